"""From text to tokens: bytes, or byte pairs that are learnt from the training text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from tidegate.lab.tasks.documents import Document
from tidegate.lab.tasks.task import DataError

__all__ = ["Tokenizer", "Tokens", "byte_tokenizer", "num_merged_tokens", "trained_tokenizer"]

Tokens = npt.NDArray[np.unsignedinteger[Any]]
"""(tokens,), in the smallest of uint8, uint16 and uint32 that holds the vocabulary."""

_CHUNK = 1 << 16
"""Characters that are encoded at once; a chunk ends where a line does."""


class Tokenizer(NamedTuple):
    """Tokens by number, and how text becomes a stream of them."""

    token_bytes: npt.NDArray[np.int64]
    """(vocabulary,): how many bytes of text a token stands for."""
    merges: Any = None
    """The byte pairs, as `tokenizers` holds them; None reads bytes as they are."""

    def encode(self, documents: Iterable[Document]) -> Tokens:
        """The documents one after another, each ended by a line break if it does not end in one."""
        if self.merges is None:
            return np.frombuffer(b"".join(map(_ended, documents)), dtype=np.uint8)
        encoded = self.merges.encode_batch_fast([chunk for text in _texts(documents) for chunk in _chunks(text)])
        dtype = np.min_scalar_type(len(self.token_bytes) - 1)
        return np.concatenate([np.empty(0, dtype), *(np.asarray(chunk.ids, dtype=dtype) for chunk in encoded)])


def num_merged_tokens(spelling: str) -> int | None:
    """The vocabulary that `bpe:4096` asks for, or None for `bytes`; a `DataError` for anything else."""
    if spelling == "bytes":
        return None
    match = re.fullmatch(r"bpe:(\d{1,7})", spelling)
    if match is None or int(match[1]) <= 256:
        raise DataError(
            f"--tokenizer must be 'bytes', or 'bpe:N' for N tokens, more than the 256 bytes; got {spelling!r}."
        )
    return int(match[1])


def byte_tokenizer() -> Tokenizer:
    """A token is a byte."""
    return Tokenizer(np.ones(256, dtype=np.int64))


def trained_tokenizer(documents: Sequence[Document], num_tokens: int) -> Tokenizer:
    """Byte pairs merged until there are `num_tokens`, or until the documents have no pair that comes twice.

    The same documents give the same merges. The text must be UTF-8: a `DataError` names a document that is not.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(
            f"--tokenizer bpe:{num_tokens} needs the package tokenizers: pip install 'tidegate[lab]'."
        ) from error
    library: Any = tokenizers
    merges = library.Tokenizer(library.models.BPE())
    merges.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = library.trainers.BpeTrainer(
        vocab_size=num_tokens,
        min_frequency=2,
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    merges.train_from_iterator((chunk for text in _texts(documents) for chunk in _chunks(text)), trainer)
    # The library writes each byte as one character of its own.
    lengths = [len(cast("str", merges.id_to_token(number))) for number in range(merges.get_vocab_size())]
    return Tokenizer(np.asarray(lengths, dtype=np.int64), merges)


def _ended(document: Document) -> bytes:
    return document.content if document.content.endswith(b"\n") else document.content + b"\n"


def _texts(documents: Iterable[Document]) -> Iterator[str]:
    for document in documents:
        try:
            yield _ended(document).decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"--tokenizer bpe reads UTF-8, and {document.name} is something else (byte {error.start}); "
                "use --tokenizer bytes or convert it."
            ) from error


def _chunks(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        stop = text.find("\n", start + _CHUNK) + 1 or len(text)
        yield text[start:stop]
        start = stop
