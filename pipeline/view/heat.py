"""A response as HTML, each token on a background that shows a figure of it. Everything is escaped.

What a model wrote is shown as text: no markup, no control characters, no change of direction.
"""

import math
from collections.abc import Sequence
from html import escape
from typing import Any

MEANINGS = {
    "sampler_logprob": "log-prob as the engine sampled it, nats",
    "old_logprob": "log-prob before the update, nats",
    "new_logprob": "log-prob in the optimizer step, nats",
    "ratio": "π_new / π_old, colour by its logarithm",
    "entropy": "of the distribution at the token, nats",
    "weight": "of the token in the loss",
    "advantage": "of the response, the same at each of its tokens",
    "clipped": "clipped at 1 - ε_low, at 1 + ε_high, or by the dual clip",
}
DIVERGING = ("ratio", "advantage")  # from below to above; others from nothing to much
# each red, green, blue
ABOVE, BELOW, MUCH = (31, 119, 180), (214, 96, 37), (125, 91, 190)
CLIPPED = {"low": BELOW, "high": ABOVE, "dual": MUCH}
STRONGEST = 0.65  # opacity, at which text is still well read in both themes
SMALLEST_RANGE = 1e-9  # nothing is magnified that is rounding
CONTROLS = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
CONTROLS |= {0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}
DIRECTIONS = dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F], 0xFFFD)
VISIBLE = CONTROLS | DIRECTIONS


def visible(text: str) -> str:
    """`text` with control characters, and those that change its direction, as signs to be seen."""
    return text.translate(VISIBLE)


def kinds(tokens: dict[str, list[Any]]) -> dict[str, str]:
    """The figures that there are of these tokens, with their meanings."""
    return {name: meaning for name, meaning in MEANINGS.items() if name in tokens}


def most_telling(tokens: dict[str, list[Any]]) -> str:
    """The first figure that differs between tokens: in a first mini-batch all ratios are 1."""
    present = [name for name in ("ratio", "entropy", *MEANINGS) if name in tokens]
    varied = (name for name in present if len(set(tokens[name])) > 1)
    return next(varied, present[0] if present else "")


def html(tokens: dict[str, list[Any]], kind: str) -> str:
    """The response's tokens as `span` elements: colour by `kind`, the figure in the title."""
    pieces = [visible(piece) or f"⟨{token}⟩"
              for piece, token in zip(tokens["piece"], tokens["token"], strict=True)]  # fmt: skip
    values = tokens[kind]
    return "".join(
        f'<span class="token" style="background: {colour}" title="{escape(title)}">'
        f"{escape(_with_ends(piece))}</span>"
        for piece, colour, title in zip(
            pieces, colours(kind, values), titles(tokens, kind), strict=True
        )
    )


def titles(tokens: dict[str, list[Any]], kind: str) -> list[str]:
    """What hovering shows: the figure, and which token it is."""
    return [
        f"{kind} {_shown(value)} · position {position} · token {token}"
        for position, (value, token) in enumerate(zip(tokens[kind], tokens["token"], strict=True))
    ]


def colours(kind: str, values: Sequence[Any]) -> list[str]:
    """A CSS colour per value; the greatest distance from nothing gets the strongest one."""
    if kind == "clipped":
        return [_colour(CLIPPED[v.split()[0]], 1.0) if v else "transparent" for v in values]
    heights = [_height(kind, value) for value in values]
    most = max((abs(height) for height in heights), default=0.0)
    if most < SMALLEST_RANGE:
        return ["transparent"] * len(heights)
    plus, minus = (
        (  # each red, green, blue
            ABOVE,
            BELOW,
        )
        if kind in DIVERGING
        else (MUCH, MUCH)
    )
    return [_colour(plus if h > 0 else minus, abs(h) / most) for h in heights]


def legend(kind: str, values: Sequence[Any]) -> str:
    """What the colours go from and to, in words."""
    if kind == "clipped":
        count = sum(bool(value) for value in values)
        return f"{count} of {len(values)} tokens clipped: orange low, blue high, violet dual"
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return "no figures"
    side = (
        "orange below, blue above" if kind in DIVERGING else "the more violet, the further from 0"
    )
    return f"{_shown(min(known))} to {_shown(max(known))}; {side}"


def _height(kind: str, value: float | None) -> float:
    """Distance from where nothing is to be seen: 0, or a ratio of 1."""
    if value is None or not math.isfinite(value) or (kind == "ratio" and value <= 0):
        return 0.0
    return math.log(value) if kind == "ratio" else float(value)


def _colour(rgb: tuple[int, int, int], strength: float) -> str:
    return f"rgba({rgb[0]}, {rgb[1]}, {rgb[2]}, {STRONGEST * strength:.3f})"


def _with_ends(piece: str) -> str:
    """A line's end is seen as well as done."""
    return piece.replace("\n", "↵\n")


def _shown(value: Any) -> str:
    if value is None or value == "":
        return "none"
    return f"{value:.5g}" if isinstance(value, float) else str(value)
