"""Byte-pair tokens of a text, kept on the disk: learnt and encoded once, and mapped by every process after that.

They lie in `$XDG_CACHE_HOME/tidegate`, `~/.cache/tidegate` if that is not set: for each text two files, named after a
hash of the text, of what is held out of it, of the size of the vocabulary and of the version of `tokenizers`. The
`.npy` holds the tokens, the `.json` the tokenizer, as that library writes it, and a checksum. All of it can be removed
at any time. What is missing or broken is made anew; where nothing can be written, tokens are made in each process.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tidegate._files import write_atomically
from tidegate._json import parse_json
from tidegate.lab.tasks.documents import Document, fingerprint
from tidegate.lab.tasks.tokenizer import EncodedText, Tokens, read_tokenizer, tokenizers_library, trained_tokenizer

_FORMAT = 2
"""To be raised when the same text comes to have other tokens, or the files another shape."""


class _Made(NamedTuple):
    """What the cache holds of a text."""

    tokens: Tokens
    """Those trained on, then those held out."""
    num_training: int
    tokenizer: str
    """JSON, as the library writes it."""

    def checksum(self) -> str:
        tokens = self.tokens
        about = [self.num_training, self.tokenizer, tokens.dtype.str, tokens.shape]
        digest = hashlib.sha256(json.dumps(about).encode())
        digest.update(tokens.data)
        return digest.hexdigest()


def merged_tokens(training: Sequence[Document], held_out: Sequence[Document], num_tokens: int) -> EncodedText:
    """Learn byte pairs from the training documents alone and encode all documents, or load both from the disk.

    Raise InputError if the package `tokenizers` is missing, or if a document is not UTF-8.
    """
    version = str(tokenizers_library(num_tokens).__version__)
    key = json.dumps([_FORMAT, fingerprint(training, held_out), num_tokens, version])
    place = _place(hashlib.sha256(key.encode()).hexdigest()[:32])
    made = _load(place) if place else None
    if made is None:
        made = _make(training, held_out, num_tokens)
        if place:
            _keep(place, made)
            made = _load(place) or made
    lengths = read_tokenizer(made.tokenizer, num_tokens).token_bytes
    count = made.num_training
    return EncodedText(made.tokens[:count], made.tokens[count:], lengths, made.tokenizer)


def _make(training: Sequence[Document], held_out: Sequence[Document], num_tokens: int) -> _Made:
    tokenizer = trained_tokenizer(training, num_tokens)
    parts = [tokenizer.encode(training), tokenizer.encode(held_out)]
    return _Made(np.concatenate(parts), len(parts[0]), tokenizer.merges.to_str())


def _place(name: str) -> Path | None:
    """Where a text is kept, less the ending; None for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tidegate" / name
    except RuntimeError:
        return None


def _load(place: Path) -> _Made | None:
    """Load what is on the disk, its tokens mapped instead of read; None unless both files are whole."""
    try:
        about: Any = parse_json(place.with_suffix(".json").read_bytes())
        with warnings.catch_warnings(action="ignore"):
            tokens: Any = np.lib.format.open_memmap(place.with_suffix(".npy"), mode="r")
        made = _Made(tokens, about["num_training"], about["tokenizer"])
        return made if made.checksum() == about["checksum"] else None
    # The header is read as a Python literal, whose faults raise errors of many classes.
    except Exception:
        return None


def _keep(place: Path, made: _Made) -> None:
    """Write both files; if they cannot be written, the text is tokenised again each time."""
    about = {"num_training": made.num_training, "tokenizer": made.tokenizer, "checksum": made.checksum()}
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(place.with_suffix(".npy"), lambda path: _save_tokens(path, made.tokens))
        write_atomically(place.with_suffix(".json"), lambda path: path.write_text(json.dumps(about)))


def _save_tokens(path: Path, tokens: Tokens) -> None:
    # Given a path, NumPy would add an ending to it.
    with path.open("wb") as file:
        np.save(file, tokens)
