"""From text to tokens: bytes, or byte pairs that are learnt from the training text."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from tidegate._files import write_atomically
from tidegate._json import parse_json
from tidegate._validation import InputError
from tidegate.lab.tasks.documents import Content, Document, character_start, fingerprint

Tokens = npt.NDArray[np.unsignedinteger[Any]]
"""(tokens,), in the smallest of uint8, uint16 and uint32 that holds the vocabulary."""

_LOGGER = logging.getLogger(__name__)
_SLICE = 1 << 16
"""Bytes after which a text is cut, at the next good place."""
_SLICES_AT_ONCE = 16
"""The library keeps many bytes for each one that it encodes, until all of a call is done."""


class EncodedText(NamedTuple):
    """Both parts of a text as tokens of one vocabulary."""

    training: Tokens
    held_out: Tokens
    token_bytes: npt.NDArray[np.int64]
    """(vocabulary,): how many bytes of text a token stands for."""
    tokenizer: str = ""
    """The byte pairs as JSON, as the library writes them; empty for bytes."""


class Tokenizer(NamedTuple):
    """Tokens by number, and how text becomes a stream of them."""

    token_bytes: npt.NDArray[np.int64]
    """(vocabulary,): how many bytes of text a token stands for."""
    merges: Any = None
    """The byte pairs, as `tokenizers` holds them; None reads bytes as they are."""

    def encode(self, documents: Iterable[Document]) -> Tokens:
        """The documents one after another, each ended by a line break if it does not end in one."""
        if self.merges is None:
            pieces = chain.from_iterable((document.content, _ending(document.content)) for document in documents)
            return np.frombuffer(b"".join(pieces), dtype=np.uint8)
        dtype = np.min_scalar_type(len(self.token_bytes) - 1)
        texts, parts = _texts(documents), [np.empty(0, dtype)]
        while some := list(islice(texts, _SLICES_AT_ONCE)):
            parts += [np.asarray(encoded.ids, dtype=dtype) for encoded in self.merges.encode_batch_fast(some)]
        return np.concatenate(parts)


def num_merged_tokens(spelling: str) -> int | None:
    """Return the vocabulary that `bpe:4096` asks for, or None for `bytes`; raise InputError for anything else."""
    if spelling == "bytes":
        return None
    match = re.fullmatch(r"bpe:(\d{1,7})", spelling)
    if match is None or int(match[1]) <= 256:
        expected = "'bytes', or 'bpe:N' for N tokens, more than the 256 bytes"
        raise InputError("tokenizer", expected=expected, got=spelling)
    return int(match[1])


def byte_tokenizer() -> Tokenizer:
    """A token is a byte."""
    return Tokenizer(np.ones(256, dtype=np.int64))


def tokenizers_library(num_tokens: int) -> Any:
    """Return the package that merges byte pairs; raise InputError if it is missing."""
    try:
        import tokenizers
    except ImportError as error:
        hint = "Byte pairs need the package tokenizers: pip install 'tidegate[lab]'."
        raise InputError("tokenizer", expected="'bytes'", got=f"bpe:{num_tokens}", hint=hint) from error
    return tokenizers


def trained_tokenizer(documents: Sequence[Document], num_tokens: int) -> Tokenizer:
    """Byte pairs merged until there are `num_tokens`, or until the documents have no pair that comes twice.

    The same documents give the same merges. It is logged that they are learnt, which may take minutes. The text must be
    UTF-8: an InputError names a document that is not.
    """
    library = tokenizers_library(num_tokens)
    num_bytes = sum(len(document.content) for document in documents)
    _LOGGER.info("learning up to %s byte pairs from %s bytes of text...", f"{num_tokens:,}", f"{num_bytes:,}")
    merges = library.Tokenizer(library.models.BPE())
    merges.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = library.trainers.BpeTrainer(
        vocab_size=num_tokens,
        min_frequency=2,
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    merges.train_from_iterator(_texts(documents), trainer)
    return _tokenizer(merges)


def read_tokenizer(text: str, num_tokens: int) -> Tokenizer:
    """The byte pairs of which `merges.to_str()` made this."""
    return _tokenizer(tokenizers_library(num_tokens).Tokenizer.from_str(text))


def portable_tokenizer(text: str) -> str:
    """The same byte pairs as JSON that also says how tokens become text again, for whoever generates."""
    library = tokenizers_library(0)
    merges = library.Tokenizer.from_str(text)
    merges.decoder = library.decoders.ByteLevel()
    return merges.to_str()


def _tokenizer(merges: Any) -> Tokenizer:
    # The library writes each byte as one character of its own.
    lengths = [len(cast("str", merges.id_to_token(number))) for number in range(merges.get_vocab_size())]
    return Tokenizer(np.asarray(lengths, dtype=np.int64), merges)


def _ending(content: Content) -> bytes:
    return b"" if content[-1:] == b"\n" else b"\n"


def slices(content: Content, num_bytes: int = _SLICE) -> Iterator[slice]:
    """Cut a text into pieces of about so many bytes, at places across which byte pairs are seldom merged."""
    start, stop = 0, -1
    while stop < len(content):
        stop = _slice_end(content, start, num_bytes)
        yield slice(start, stop)
        start = stop


def _texts(documents: Iterable[Document]) -> Iterator[str]:
    """The documents, a slice at a time."""
    for document in documents:
        content = document.content
        for piece in slices(content):
            text = _decode(document, piece.start, piece.stop)
            yield text + _ending(content).decode() if piece.stop == len(content) else text


def _slice_end(content: Content, start: int, num_bytes: int) -> int:
    """Choose where to cut: after a line break, else before a space, else before a character."""
    first, last = start + num_bytes, min(start + 2 * num_bytes, len(content))
    if first >= len(content):
        return len(content)
    window = bytes(content[first:last])
    if (line := window.find(b"\n")) >= 0:
        return first + line + 1
    if last == len(content):
        return last
    space = window.find(b" ")
    return first + space if space >= 0 else character_start(content, last)


def _decode(document: Document, start: int, stop: int) -> str:
    try:
        return bytes(document.content[start:stop]).decode()
    except UnicodeDecodeError as error:
        hint = f"Or convert {document.name}, which is something else at byte {start + error.start}."
        raise InputError("tokenizer", expected="'bytes' for text that is not UTF-8", hint=hint) from error


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
