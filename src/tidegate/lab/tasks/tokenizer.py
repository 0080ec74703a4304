"""Tokenizers: bytes, or byte-pair encoding (BPE) trained on the training text."""

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
"""(tokens,), in the smallest of uint8, uint16 and uint32 for the vocabulary."""

_LOGGER = logging.getLogger(__name__)
_SLICE = 1 << 16
"""Bytes after which a text is cut, at the next suitable position."""
_SLICES_AT_ONCE = 16
"""The library allocates a multiple of the text that one call encodes."""


class EncodedText(NamedTuple):
    """Training and held-out text as tokens of one vocabulary."""

    training: Tokens
    held_out: Tokens
    token_bytes: npt.NDArray[np.int64]
    """(vocabulary,): number of bytes of each token."""
    tokenizer: str = ""
    """The BPE tokenizer as JSON, as the library writes it; empty for bytes."""


class Tokenizer(NamedTuple):
    """A vocabulary, and the encoding of documents as one stream of tokens."""

    token_bytes: npt.NDArray[np.int64]
    """(vocabulary,): number of bytes of each token."""
    merges: Any = None
    """The tokenizer of the package `tokenizers`; None for bytes."""

    def encode(self, documents: Iterable[Document]) -> Tokens:
        """Encode and concatenate documents, each with a line break at its end."""
        if self.merges is None:
            pieces = chain.from_iterable((document.content, _ending(document.content)) for document in documents)
            return np.frombuffer(b"".join(pieces), dtype=np.uint8)
        dtype = np.min_scalar_type(len(self.token_bytes) - 1)
        texts, parts = _texts(documents), [np.empty(0, dtype)]
        while some := list(islice(texts, _SLICES_AT_ONCE)):
            parts += [np.asarray(encoded.ids, dtype=dtype) for encoded in self.merges.encode_batch_fast(some)]
        return np.concatenate(parts)


def num_merged_tokens(spelling: str) -> int | None:
    """Return 4096 for `bpe:4096`, and None for `bytes`. Raise InputError for anything else."""
    if spelling == "bytes":
        return None
    match = re.fullmatch(r"bpe:(\d{1,7})", spelling)
    if match is None or int(match[1]) <= 256:
        raise InputError("tokenizer", expected="'bytes', or 'bpe:N' with a vocabulary of N > 256 tokens", got=spelling)
    return int(match[1])


def byte_tokenizer() -> Tokenizer:
    """Return the tokenizer whose tokens are bytes."""
    return Tokenizer(np.ones(256, dtype=np.int64))


def tokenizers_library(num_tokens: int) -> Any:
    """Return the package `tokenizers`. Raise InputError if it is missing."""
    try:
        import tokenizers
    except ImportError as error:
        hint = "BPE needs the package tokenizers: pip install 'tidegate[lab]'."
        raise InputError("tokenizer", expected="'bytes'", got=f"bpe:{num_tokens}", hint=hint) from error
    return tokenizers


def trained_tokenizer(documents: Sequence[Document], num_tokens: int) -> Tokenizer:
    """Train a BPE tokenizer of `num_tokens` tokens, or fewer if no other pair occurs twice.

    The same documents give the same tokenizer. Training may take minutes and is logged. Raise InputError for a document
    that is not UTF-8.
    """
    library = tokenizers_library(num_tokens)
    num_bytes = sum(len(document.content) for document in documents)
    _LOGGER.info("training a BPE tokenizer of %s tokens on %s bytes of text...", f"{num_tokens:,}", f"{num_bytes:,}")
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
    """Return the tokenizer that `merges.to_str()` wrote."""
    return _tokenizer(tokenizers_library(num_tokens).Tokenizer.from_str(text))


def portable_tokenizer(text: str) -> str:
    """Return the same BPE tokenizer as JSON with a decoder, for generation."""
    library = tokenizers_library(0)
    merges = library.Tokenizer.from_str(text)
    merges.decoder = library.decoders.ByteLevel()
    return merges.to_str()


def _tokenizer(merges: Any) -> Tokenizer:
    # The library represents each byte by one character.
    lengths = [len(cast("str", merges.id_to_token(number))) for number in range(merges.get_vocab_size())]
    return Tokenizer(np.asarray(lengths, dtype=np.int64), merges)


def _ending(content: Content) -> bytes:
    return b"" if content[-1:] == b"\n" else b"\n"


def slices(content: Content, num_bytes: int = _SLICE) -> Iterator[slice]:
    """Yield slices of about `num_bytes` bytes, cut where merges across the cut are rare."""
    start, stop = 0, -1
    while stop < len(content):
        stop = _slice_end(content, start, num_bytes)
        yield slice(start, stop)
        start = stop


def _texts(documents: Iterable[Document]) -> Iterator[str]:
    """Yield the documents in slices, decoded from UTF-8."""
    for name, content in documents:
        for piece in slices(content):
            try:
                text = bytes(content[piece]).decode()
            except UnicodeDecodeError as error:
                hint = f"Or convert {name}, which has an invalid byte at {piece.start + error.start}."
                raise InputError("tokenizer", expected="'bytes' for text that is not UTF-8", hint=hint) from error
            yield text + _ending(content).decode() if piece.stop == len(content) else text


def _slice_end(content: Content, start: int, num_bytes: int) -> int:
    """Return the end of a slice: after a line break, else before a space, else before a character."""
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


_FORMAT = 2
"""Increase it when the tokens of a text or the format of the files change."""


class _CachedTokens(NamedTuple):
    """A cache entry."""

    tokens: Tokens
    """Training tokens, then held-out tokens."""
    num_training: int
    tokenizer: str
    """As JSON, written by the library."""

    def checksum(self) -> str:
        header = [self.num_training, self.tokenizer, self.tokens.dtype.str, self.tokens.shape]
        checksum = hashlib.sha256(json.dumps(header).encode())
        checksum.update(self.tokens.data)
        return checksum.hexdigest()


def merged_tokens(training: Sequence[Document], held_out: Sequence[Document], num_tokens: int) -> EncodedText:
    """Train a BPE tokenizer on the training documents and encode all documents, or load both from the cache.

    Raise InputError if the package `tokenizers` is missing, or if a document is not UTF-8.
    """
    version = str(tokenizers_library(num_tokens).__version__)
    key = json.dumps([_FORMAT, fingerprint(training, held_out), num_tokens, version])
    path = _cache_path(hashlib.sha256(key.encode()).hexdigest()[:32])
    cached = path and _load(path)
    if cached is None:
        encoder = trained_tokenizer(training, num_tokens)
        parts = [encoder.encode(training), encoder.encode(held_out)]
        cached = _CachedTokens(np.concatenate(parts), len(parts[0]), encoder.merges.to_str())
        if path:
            _save(path, cached)
            cached = _load(path) or cached
    tokens, count, tokenizer = cached
    return EncodedText(tokens[:count], tokens[count:], read_tokenizer(tokenizer, num_tokens).token_bytes, tokenizer)


def _cache_path(name: str) -> Path | None:
    """Return the path of a cache entry without suffix; None for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tidegate" / name
    except RuntimeError:
        return None


def _load(path: Path) -> _CachedTokens | None:
    """Load a cache entry with memory-mapped tokens; None if a file is missing or damaged."""
    try:
        header: Any = parse_json(path.with_suffix(".json").read_bytes())
        with warnings.catch_warnings(action="ignore"):
            tokens: Any = np.lib.format.open_memmap(path.with_suffix(".npy"), mode="r")
        cached = _CachedTokens(tokens, header["num_training"], header["tokenizer"])
        return cached if cached.checksum() == header["checksum"] else None
    # The header is parsed as a Python literal, which raises errors of many classes.
    except Exception:
        return None


def _save(path: Path, cached: _CachedTokens) -> None:
    """Write a cache entry, ignoring errors: without it the text is tokenized each time."""
    header = {"num_training": cached.num_training, "tokenizer": cached.tokenizer, "checksum": cached.checksum()}
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path.with_suffix(".npy"), lambda file: _save_tokens(file, cached.tokens))
        write_atomically(path.with_suffix(".json"), lambda file: file.write_text(json.dumps(header)))


def _save_tokens(path: Path, tokens: Tokens) -> None:
    # NumPy would append a suffix to a path.
    with path.open("wb") as file:
        np.save(file, tokens)
