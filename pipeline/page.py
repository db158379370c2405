"""A page that needs nothing else: a template filled in, its style and its charts' script inside.

Text is escaped, and the page's own script is the only one that a browser may run in it.
"""

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from pipeline import artifacts, figures, template
from stages.errors import InputError


def filled(name: str, *, charts: dict[str, Any], datasets: dict[str, Any], **given: object) -> str:
    """A template that extends page.html, as HTML.

    Args:
        charts: Vega-Lite by name, for the elements with `data-chart`; none: the page has no script.
        datasets: the rows that the charts name.
        given: what the template names.
    """
    from markupsafe import Markup

    script = _script() if charts else ""
    page = {
        "data": {"charts": charts, "datasets": datasets, "config": figures.CONFIG},
        # the files of this package, and nothing that a run recorded
        "style": Markup(template.source("page.css")),
        "script": Markup(script),
        "hash": _hash(script),
    }
    return template.filled(name, {**given, **page}, escape=True)


def write(text: str, out: Path) -> int:
    """Write a page, whole or not at all; returns its bytes.

    Raises `InputError` if `out` has no directory to lie in.
    """
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise InputError(f"--out {out}: expected the name of a file in a directory that is there")
    artifacts.write_durably(out, text)
    return len(text.encode())


@cache
def _script() -> str:
    """Vega, Vega-Lite and Vega-Embed with what draws the page's charts, in a scope of its own."""
    import vl_convert

    return f"(() => {{{vl_convert.javascript_bundle(template.source('page.js'))}\n}})();"


def _hash(script: str) -> str:
    """A script as a Content-Security-Policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
