r"""The final answer of a response: what it says last, on an answer line or in a box.

An answer line starts with `Answer:`, in any case, with `The` or `Final` before it, `is` after it
and Markdown around it, or with `答案：`. Where the rest of the line is empty, the next one counts.
A box is `\boxed{…}` with its braces balanced; one that is never closed is no answer. The last of
all these is the final answer, whatever follows. A number somewhere in the text is none.
"""

import re
import unicodedata

LINE = re.compile(
    r"^[ \t>*_#`~-]{0,16}(?:the[ \t]{1,4})?(?:(?:final|correct)[ \t]{1,4})?(?:answer|最终答案|答案)"
    r"(?:[ \t]{1,4}is|是)?[ \t*_`]{0,8}[:：](.*)$",
    re.IGNORECASE | re.MULTILINE,
)
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
BOX = re.compile(r"\\(?:boxed|fbox)\s{0,4}")
MINUS = str.maketrans("−﹣‐‑‒–", "------")  # NFKC leaves them; a dash before a digit is a minus
WRAPPED = re.compile(
    r"\$\$(.*)\$\$|\$(.*)\$|\\\((.*)\\\)|\\\[(.*)\\\]",  # LaTeX's ways to write a formula
    re.DOTALL,
)
LAYERS = 8  # of wrapping that are taken off


def final_answer(text: str) -> str | None:
    """What the response says last, without what it is wrapped in; None if it gives no answer."""
    lines = list(LINE.finditer(text))
    line = lines[-1] if lines else None
    box = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if line is None or box >= line.start(1):
        inside = last_boxed(text)
        return None if inside is None else bare(inside)
    below = text[line.end() :].split("\n", 4)[:4]  # where nothing stands on the line itself
    return bare(line[1]) or next((bare(each) for each in below if each.strip()), "")


def last_boxed(text: str) -> str | None:
    r"""What the last `\boxed{…}` or `\fbox{…}` holds, its own braces balanced; of `\boxed 5`, 5."""
    opening = BOX.match(text, max(text.rfind("\\boxed"), text.rfind("\\fbox"), 0))
    if opening is None:
        return None
    rest = text[opening.end() :]
    if not rest.startswith("{"):
        return re.split(r"[$\n]", rest, maxsplit=1)[0].rstrip(" .")
    end = _end(rest)
    return None if end is None else rest[1 : end - 1]


def bare(answer: str) -> str:
    r"""The answer without full stop, Markdown, dollars, box and \text around the whole of it."""
    for _ in range(LAYERS):
        before = answer
        answer = answer.strip(" \t\r\n*`").rstrip("。 ")
        if answer.endswith(".") and not answer.endswith("..."):
            answer = answer[:-1].rstrip()
        if found := WRAPPED.fullmatch(answer):
            inside = next(group for group in found.groups() if group is not None)
            if "$" not in inside:  # else two formulas, not one
                answer = inside.strip()
        for command in ("\\boxed", "\\fbox", "\\text", "\\mathrm", "\\mathbf", "\\textbf"):
            rest = answer.removeprefix(command)
            if rest != answer and rest.startswith("{") and _end(rest) == len(rest):
                answer = rest[1:-1].strip()
        if answer == before:
            break
    return answer


def plain(text: str) -> str:
    """The text with full-width forms as ASCII (NFKC) and every minus sign as a hyphen."""
    return nfkc(text.translate(MINUS)).strip()


def nfkc(text: str) -> str:
    """Full-width letters and the like by their plain forms."""
    # in pieces: Python takes n² to order n combining marks, 13 s for 100,000
    return "".join(
        unicodedata.normalize("NFKC", text[start : start + 1000])
        for start in range(0, len(text), 1000)
    )


def balanced(text: str) -> bool:
    """Whether every brace is closed."""
    return _end("{" + text + "}") == len(text) + 2


def _end(text: str) -> int | None:
    """Where the brace that `text` starts with is closed; one after a backslash is text."""
    depth = 0
    for brace in BRACE.finditer(text):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return brace.end()
    return None
