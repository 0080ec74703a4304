"""How an error quotes what it was given: as Python writes it, and never at length."""

from __future__ import annotations

_LONGEST = 200


def echo(value: object) -> str:
    """Return the value as Python writes it; of a long one its beginning, and how long it is.

    Control characters in strings are escaped, as `repr` does.
    """
    try:
        text = repr(value)
    except ValueError:
        # Python does not write whole numbers of more than 4,300 digits.
        return f"a value of type {type(value).__name__} that is too long to write"
    return shorten(text)


def shorten(text: str) -> str:
    """Return the text; of a long one its beginning, and how long it is."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text):,} characters)"
