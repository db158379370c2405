"""The files below `templates`, filled in."""

from pathlib import Path

TEMPLATES = Path(__file__).parent / "templates"


def source(name: str) -> str:
    """A template, or what goes into one, as it stands."""
    return (TEMPLATES / name).read_text(encoding="utf-8")


def filled(name: str, given: dict[str, object], *, escape: bool) -> str:
    """The template with the values that it names; one that is lacking is an error.

    Args:
        escape: whether text is escaped for HTML.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=escape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(name).render(given)
