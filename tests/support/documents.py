"""Run the Python blocks of a Markdown document, or an example, and find a document's broken links.

Run one by hand with `python tests/support/documents.py README.md`; several run in one interpreter, one after another.
Quote an example together with its options: `"examples/train_jax.py --steps 3"`.
"""

import re
import runpy
import shlex
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

FENCE = re.compile(r"(?P<indent>[ >]*)(?P<fence>`{3,}|~{3,})(?P<info>[^`]*)")
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)|^ *\[[^\]]+\]:\s*<?([^\s>]+)|\b(?:href|src)=\"([^\"]+)\"", re.MULTILINE)
SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


class DocumentError(Exception):
    """A failing block or a broken link; the message begins with file:line, or the file of an example."""


def run(document: Path) -> int:
    """Execute the Python blocks in order, in one namespace, and return their number."""
    namespace = {"__name__": "__main__"}
    blocks = list(python_blocks(document))
    for line, source in blocks:
        try:
            # Blank lines in front make the traceback count the document's lines.
            exec(compile("\n" * (line - 1) + source, str(document), "exec"), namespace)
        except Exception as error:
            raise DocumentError(f"{document}:{_failing_line(error, document, line)}: {error!r}") from error
    return len(blocks)


def run_example(example: Path, options: list[str]) -> None:
    """Execute an example like `python example options`, but in this interpreter."""
    before = sys.argv, sys.path
    sys.argv, sys.path = [str(example), *options], [str(example.parent), *sys.path]
    try:
        runpy.run_path(str(example), run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise DocumentError(f"{example}: exited with {ended.code!r}") from ended
    except Exception as error:
        raise DocumentError(f"{example}: {error!r}") from error
    finally:
        sys.argv, sys.path = before


def python_blocks(document: Path) -> Iterator[tuple[int, str]]:
    """Yield the first line number and the source of every Python block, also inside an HTML comment."""
    for line, info, source in _split(document)[1]:
        if re.match(r"[{.]*py", info, re.IGNORECASE):
            yield line, source


def broken_links(document: Path) -> list[str]:
    """Return links to missing files, as file:line: target. URLs and anchors in the same page pass."""
    prose = _split(document)[0]
    found = []
    for match in LINK.finditer(re.sub(r"`[^`\n]*`", lambda code: " " * len(code[0]), prose)):
        target = next(filter(None, match.groups()))
        path = target.split("#")[0]
        if path and not SCHEME.match(target) and (path.startswith("/") or not (document.parent / path).exists()):
            found.append(f"{document}:{prose.count(chr(10), 0, match.start()) + 1}: {target}")
    return found


def _split(document: Path) -> tuple[str, list[tuple[int, str, str]]]:
    """Return the prose, with code blanked out line by line, and the fenced blocks: first line, info string, source."""
    prose, blocks = [], []
    opening, start, body = None, 0, []
    for number, text in enumerate(document.read_text(encoding="utf-8").splitlines(), start=1):
        fence = FENCE.fullmatch(text)
        if opening is None and fence:
            opening, start, body = fence, number, []
        elif opening is None:
            prose.append(text)
            continue
        elif fence and fence["fence"].startswith(opening["fence"]) and not fence["info"].strip():
            blocks.append((start + 1, opening["info"].strip(), textwrap.dedent("\n".join(body)) + "\n"))
            opening = None
        else:
            body.append(text)
        prose.append("")
    if opening is not None:
        raise DocumentError(f"{document}:{start}: this block is never closed")
    return "\n".join(prose), blocks


def _failing_line(error: Exception, document: Path, first: int) -> int:
    if isinstance(error, SyntaxError) and error.filename == str(document):
        return error.lineno or first
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(document)]
    return lines[-1] if lines else first


def main(sources: list[str]) -> int:
    """Run documents and examples, each in its own folder, print the results, and return an exit code."""
    failed = False
    for source in sources:
        path, *options = shlex.split(source)
        file = Path(path).resolve()
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            try:
                if file.suffix == ".py":
                    run_example(file, options)
                    print(f"{file}: ran", flush=True)
                else:
                    print(f"{file}: {run(file)} blocks ran", flush=True)
            except DocumentError:
                failed = True
                traceback.print_exc()
        if pyplot := sys.modules.get("matplotlib.pyplot"):
            pyplot.close("all")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
