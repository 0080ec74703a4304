"""Translate a docstring of this library, which is Markdown with a line for each array, to reStructuredText.

Supported are paragraphs, `code`, $formulas$ (inline or displayed), code that is indented by four spaces, Google's
sections `Args:`, `Returns:` and `Raises:`, and the older lines `name : meaning`; both become a function's arguments.
"""

import re
import textwrap
from collections.abc import Callable, Iterator

ARGUMENT = re.compile(r"(?P<names>\w+(?:, \w+)*) +: +(?P<text>.+)")
SECTION = re.compile(r"(Args|Returns|Raises):")
ENTRY = re.compile(r"(?P<names>[*\w]+(?:, [*\w]+)*): +(?P<text>.+)", re.DOTALL)
SHAPE = re.compile(r"\((?:\.\.\.|\w+)?(?:, [\w ·/+-]+)*,?\)(?=$|[\s,;:])")
INLINE = re.compile(r"``(?P<double>.+?)``|`(?P<code>[^`]+)`|\$(?P<formula>[^$]+)\$", re.DOTALL)

Link = Callable[[str], str | None]
"""Returns the address of the object that a piece of code names, if it is described anywhere."""


def to_rst(docstring: str, link: Link) -> list[str]:
    """Translate a dedented docstring; `link` returns the address of a piece of code."""
    written: list[str] = []
    for paragraph in re.split(r"\n\s*\n", docstring.strip("\n")):
        lines = paragraph.splitlines()
        if lines and SECTION.fullmatch(lines[0]):
            written += [*_section(lines[0][:-1], textwrap.dedent("\n".join(lines[1:])), link), ""]
        elif lines and all(line.startswith("    ") for line in lines):
            written += ["::", "", *lines, ""]
        elif paragraph.startswith("$$") and paragraph.endswith("$$"):
            written += [".. math::", "", *(f"   {line}" for line in paragraph.strip("$").splitlines()), ""]
        else:
            for piece in _pieces(lines):
                written += [*_translate(piece, link), ""]
    return written


def _section(title: str, text: str, link: Link) -> list[str]:
    """Translate a section: one entry for each line that is not indented, or a single entry for `Returns`."""
    if title == "Returns":
        whole, *parts = re.split(r"\n +(?=\w+(?:, \w+)*: )", text)
        written = [f":returns: {to_inline(_joined(whole), link)}"]
        for entry in map(ENTRY.fullmatch, parts):
            written += ["", f"   - ``{entry['names']}``: {to_inline(_joined(entry['text']), link)}"]
        return written
    field = "raises" if title == "Raises" else "param"
    return [
        f":{field} {name}: {to_inline(_joined(entry['text']), link)}"
        for entry in map(ENTRY.fullmatch, re.split(r"\n(?! )", text))
        for name in entry["names"].replace("*", "").split(", ")
    ]


def _joined(text: str) -> str:
    return " ".join(line.strip() for line in text.splitlines())


def _pieces(lines: list[str]) -> Iterator[list[str]]:
    """Cut a paragraph before each line of an argument, and before each line that begins with `code` and a colon."""
    piece: list[str] = []
    for line in lines:
        if piece and re.match(r"\w+(, \w+)* +: |`[^`]+` ?: ", line):
            yield piece
            piece = []
        piece.append(line)
    if piece:
        yield piece


def _translate(piece: list[str], link: Link) -> list[str]:
    argument = ARGUMENT.match(piece[0])
    if argument is None:
        text = to_inline("\n".join(piece), link)
        return [f"- {text}"] if re.match(r"`[^`]+` ?: ", piece[0]) else text.splitlines()
    written: list[str] = []
    # Short docstrings have several arguments in a line, with a semicolon between them.
    for part in re.split(r"; +(?=\w+(?:, \w+)* +: )", " ".join(_until_nested(piece))):
        names, text = ARGUMENT.match(part).group("names", "text")
        for name in names.split(", "):
            field = name if name == "returns" else f"param {name}"
            written.append(f":{field}: {to_inline(text, link)}")
    for line in piece[len(_until_nested(piece)) :]:
        names, text = ARGUMENT.match(line.strip()).group("names", "text")
        written += ["", f"   - ``{names}``: {to_inline(text, link)}"]
    return written


def _until_nested(piece: list[str]) -> list[str]:
    """Return the lines of an argument before those of its parts, which look like indented arguments."""
    for place, line in enumerate(piece[1:], start=1):
        if ARGUMENT.match(line.strip()):
            return [part.strip() for part in piece[:place]]
    return [part.strip() for part in piece]


def to_inline(text: str, link: Link) -> str:
    """Translate the code and the formulas of a text, mark a leading shape, and escape the rest."""
    shape = SHAPE.match(text)
    if shape:
        return f"``{shape[0]}``" + _inline(text[shape.end() :], link, before="`")
    return _inline(text, link)


def _inline(text: str, link: Link, before: str = "") -> str:
    written, end = "", 0
    for match in INLINE.finditer(text):
        written += _escape(text[end : match.start()])
        # Markup needs whitespace around it; an escaped space separates and is not shown.
        written += r"\ " + _role(match, link) + r"\ "
        end = match.end()
    tail = _escape(text[end:])
    return (r"\ " if before and tail and not tail[0].isspace() else "") + written + tail


def _role(match: re.Match[str], link: Link) -> str:
    if match["formula"] is not None:
        return f":math:`{match['formula'].strip()}`"
    code = (match["double"] or match["code"]).replace("\n", " ")
    address = link(code)
    return f"``{code}``" if address is None else f":py:obj:`{code} <{address}>`"


def _escape(text: str) -> str:
    return re.sub(r"([\\*_|`])", r"\\\1", text)
