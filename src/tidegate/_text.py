"""Display untrusted text: quoted, shortened, and without terminal control characters."""

from __future__ import annotations

import re
from collections.abc import Sequence

_LONGEST = 200
_STEERING = re.compile(
    "["
    r"\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters, but for tab and line break
    r"\u2028\u2029\u202a-\u202e\u2066-\u2069"  # breaks of lines and changes of direction
    r"\ud800-\udfff"  # lone surrogates: bytes of file names that are not UTF-8
    "]"
)


def short_repr(value: object) -> str:
    """Return the `repr` of a value, shortened if it is long; control characters in strings are escaped."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        # Python does not print integers of more than 4,300 digits, nor values that are nested too deeply.
        return f"a value of type {type(value).__name__} that cannot be printed"
    return shorten(text)


def shorten(text: str) -> str:
    """Return the text; if it is long, its beginning and its length."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text):,} characters)"


def printable(text: str) -> str:
    r"""Return the text with terminal control characters escaped as in JSON, such as `\u001b`; tab and line break stay.

    Strings of a JSON text keep their values.
    """
    return _STEERING.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


def list_some(items: Sequence[str], *, most: int = 6) -> str:
    """Join the first items by commas, and append the number of the others."""
    rest = len(items) - most
    return ", ".join(items[:most]) + (f" and {rest} more" if rest > 0 else "")


def number_of(count: int, noun: str) -> str:
    """Return a count with its singular noun of a regular plural, as in "1 batch" and "2,048 batches"."""
    ending = "" if count == 1 else "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{count:,} {noun}{ending}"
