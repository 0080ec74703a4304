"""Split a source of text into training and held-out tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from tidegate._text import number_of
from tidegate.lab.tasks.documents import Document, character_start
from tidegate.lab.tasks.shards import ShardedTokens, ShardIndex, open_shards, tokenizer_text
from tidegate.lab.tasks.source import Corpus, TokenFile
from tidegate.lab.tasks.tokenizer import EncodedText, byte_tokenizer, merged_tokens, num_merged_tokens, read_tokenizer

_BYTES_PER_TOKEN = 8
"""More than the average BPE token: enough bytes for a held-out window before tokens can be counted."""

TokenStream: TypeAlias = npt.NDArray[np.integer[Any]] | ShardedTokens
"""Has a length, and is indexed by an array of positions."""


class Streams(NamedTuple):
    """Training and held-out tokens, with their origin."""

    training: TokenStream
    held_out: TokenStream
    vocab_size: int
    token_bytes: npt.NDArray[np.int64] | None
    """(vocabulary,): number of bytes of each token; None if unknown."""
    title: str
    rule: str
    """The rule that chose the held-out part, in words."""
    num_documents: int
    missing: tuple[str, ...] = ()
    tokenizer: str = ""
    """The BPE tokenizer as JSON; empty if there is none."""


def text_streams(corpus: Corpus, *, tokenizer: str, share: float, window: int) -> Streams:
    """Split documents and tokenize them; a BPE tokenizer is trained only on the training documents.

    A share of the text is held out, but at least `window` tokens. The tokenizer is `bytes` or `bpe:N`.
    """
    num_tokens = num_merged_tokens(tokenizer)
    at_least = window if num_tokens is None else window * _BYTES_PER_TOKEN
    if corpus.held_out is None:
        split = hold_out(corpus.documents, share=share, at_least=at_least)
    else:
        split = Split(corpus.documents, corpus.held_out, f"a fixed list of {len(corpus.held_out)} files")
    if num_tokens is None:
        encoder = byte_tokenizer()
        encoded = EncodedText(encoder.encode(split.training), encoder.encode(split.held_out), encoder.token_bytes)
    else:
        encoded = merged_tokens(split.training, split.held_out, num_tokens)
    return Streams(
        **encoded._asdict(),
        vocab_size=len(encoded.token_bytes),
        title=corpus.title,
        rule=split.rule,
        num_documents=len(corpus.documents) + len(corpus.held_out or ()),
        missing=corpus.missing,
    )


def token_streams(file: TokenFile, *, share: float, window: int) -> Streams:
    """Split the tokens of a file; the last ones are held out."""
    count = len(file.tokens) - num_held_out(len(file.tokens), share=share, at_least=window)
    return Streams(
        training=file.tokens[:count],
        held_out=file.tokens[count:],
        vocab_size=file.vocab_size,
        token_bytes=None,
        title=file.title,
        rule=f"the last {100 * (1 - count / len(file.tokens)):.3g} % of the tokens",
        num_documents=1,
    )


def shard_streams(folder: Path, index: ShardIndex) -> Streams:
    """Map the tokens of a folder of shards; the last part of each is held out."""
    training, held_out = open_shards(folder, index)
    tokenizer = tokenizer_text(folder, index)
    token_bytes = (read_tokenizer(tokenizer, index.vocab_size) if tokenizer else byte_tokenizer()).token_bytes
    return Streams(
        training=training,
        held_out=held_out,
        vocab_size=index.vocab_size,
        token_bytes=token_bytes,
        title=f"{number_of(len(index.shards), 'shard')} of {index.title}",
        rule=f"the last {100 * len(held_out) / (len(training) + len(held_out)):.3g} % of each shard",
        num_documents=sum(shard.num_documents for shard in index.shards),
        tokenizer=tokenizer,
    )


class Split(NamedTuple):
    """Training and held-out documents."""

    training: tuple[Document, ...]
    held_out: tuple[Document, ...]
    rule: str
    """The rule that chose the held-out part, in words."""


def num_held_out(total: int, *, share: float, at_least: int) -> int:
    """Return the number to hold out: a share of the total, or `at_least` if that is more, but at most half."""
    return min(max(round(share * total), at_least), total // 2)


def hold_out(documents: Sequence[Document], *, share: float, at_least: int) -> Split:
    """Split documents so that about a share of all bytes, and if possible `at_least` bytes, are held out.

    Whole documents are held out in the order of a hash of their content, except those that would exceed twice the
    wanted size. Copies of a document stay together. If that gives less than half the wanted size, as with one document
    or a few large ones, the end of each document is held out instead.
    """
    digests = [hashlib.sha256(document.content).digest() for document in documents]
    sizes: dict[bytes, int] = {}
    for document, digest in zip(documents, digests, strict=True):
        sizes[digest] = sizes.get(digest, 0) + len(document.content)
    total = sum(sizes.values())
    wanted = num_held_out(total, share=share, at_least=at_least)
    chosen = _choose(sizes, wanted, limit=min(2 * wanted, total // 2))
    if sum(map(sizes.__getitem__, chosen)) < max(wanted // 2, min(at_least, wanted), 1):
        return _ends(documents, wanted / total)
    sides = [digest in chosen for digest in digests]
    held_out = tuple(document for document, out in zip(documents, sides, strict=True) if out)
    training = tuple(document for document, out in zip(documents, sides, strict=True) if not out)
    return Split(training, held_out, f"{len(held_out)} of {len(documents)} documents, chosen by a hash")


def _choose(sizes: Mapping[bytes, int], wanted: int, limit: int) -> set[bytes]:
    """Choose digests in their order until they have the wanted bytes, skipping those that exceed the limit."""
    chosen: set[bytes] = set()
    taken = 0
    for digest in sorted(sizes):
        if taken < wanted and taken + sizes[digest] <= limit:
            chosen.add(digest)
            taken += sizes[digest]
    return chosen


def _ends(documents: Sequence[Document], share: float) -> Split:
    """Split each document at the same share; the parts are views, since a text may be large."""
    whole = [(name, memoryview(content)) for name, content in documents]
    cuts = [character_start(content, round((1 - share) * len(content))) for _, content in whole]
    training = tuple(Document(name, content[:cut]) for (name, content), cut in zip(whole, cuts, strict=True))
    held_out = tuple(Document(name, content[cut:]) for (name, content), cut in zip(whole, cuts, strict=True))
    of = "the document" if len(documents) == 1 else f"each of the {len(documents)} documents"
    return Split(training, held_out, f"the last {100 * share:.3g} % of {of}")
