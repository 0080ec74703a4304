"""JSON and scripts inside a page, so that no text of theirs can end the element that holds them."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from typing import Any

from tidegate._json import without_nan
from tidegate._text import printable


def json_text(value: Any) -> str:
    """Write any JSON value as text; nan and infinities, which JSON does not have, become null."""
    return printable(json.dumps(without_nan(value), allow_nan=False, ensure_ascii=False, indent=1))


def embedded_json(value: Any) -> str:
    """JSON for a script element of a data type: the same value, without the letters that HTML would read."""
    text = json.dumps(without_nan(value), allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def compress_text(text: str) -> str:
    """Compress text by gzip and base64; the same text gives the same result."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def script_hash(source: str) -> str:
    """A script's name in a Content-Security-Policy: only scripts that are named there run."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
