"""Find phrases that nobody in this field writes, and name a replacement for each. `make check` runs this file."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

PHRASES = {
    r"(not )?told apart": "no significant difference",
    r"anew": "again",
    r"(goes|went|going) on( with)?": "continue, resume",
    r"go on with": "continue, resume",
    r"held against": "compared with",
    r"(?<!there\s)is no (file|folder|number|model|text|json|cache|image|array|tensor|multiple|gate|layer)": "is not a",
    r"mend(s|ed|ing)?": "fix, repair",
    r"refused in words": "rejected with an error",
    r"what (came|comes|became|becomes) of": "the result of",
    r"of its own accord": "automatically",
    r"by the way": "also",
    r"the luck of": "selection noise",
    r"(how|so) surely": "with what confidence",
    r"lest": "so that … not",
    r"whoever": "the caller, the user",
    r"heed(s|ed|ing)?": "use, ignore",
    r"parted by": "separated by",
    r"seldom(er)?": "rarely",
    r"times in (five|5)": "power",
    r"nothing is lost": "all progress is saved",
    r"of no use": "useless",
    r"is no trouble": "works",
    r"at work in": "locked by, running in",
    r"makes? nonsense of": "invalidates",
}
"""Regular expressions in lower case, and their replacement."""

_GAP = r"[\s#*>]+"
_FINDERS = {
    re.compile(rf"\b{phrase.replace(' ', _GAP)}\b", re.IGNORECASE): instead for phrase, instead in PHRASES.items()
}


def flagged(text: str) -> list[str]:
    """Return `line: phrase (write …)` for each phrase in a text, also if it wraps over two lines."""
    found = [
        (text.count("\n", 0, match.start()) + 1, " ".join(match[0].split()), instead)
        for finder, instead in _FINDERS.items()
        for match in finder.finditer(text)
    ]
    return [f"{line}: {phrase!r} (write: {instead})" for line, phrase, instead in sorted(found)]


def main() -> int:
    """Print the flagged phrases of all files that git tracks; return 1 if there are any."""
    listing = subprocess.run(
        ["git", "ls-files", "*.py", "*.md", "*.html", "*.js", "*.css", "Makefile"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    own = {"tests/support/phrases.py", "tests/architecture/test_phrases.py"}
    lines = [
        f"{name}:{line}"
        for name in listing.stdout.splitlines()
        if name not in own
        for line in flagged((ROOT / name).read_text(encoding="utf-8"))
    ]
    print(*lines, sep="\n", end="\n" if lines else "")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
