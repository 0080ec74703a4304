"""Which part of a text is held out: whole documents if there are enough of them, else the end of each."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tidegate.lab.tasks.documents import Document, character_start


class Split(NamedTuple):
    """A text in two parts."""

    training: tuple[Document, ...]
    held_out: tuple[Document, ...]
    rule: str
    """How the second part was chosen, in words."""


def num_held_out(total: int, *, share: float, at_least: int) -> int:
    """Return how much of a total to hold out: a share of it, or `at_least` if that is more, never more than half."""
    return min(max(round(share * total), at_least), total // 2)


def hold_out(documents: Sequence[Document], *, share: float, at_least: int) -> Split:
    """Divide documents so that about a share of all bytes, and `at_least` so many if that can be, is held out.

    Whole documents are taken in the order of a hash of their contents, those that would make it more than twice the
    wanted size left out. Copies of a document go the same way. If that gives less than half the wanted size (one
    document, or a few large ones) the end of each document is held out instead.
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
    """Choose digests in their order until they have the wanted bytes, skipping those that would pass the limit."""
    chosen: set[bytes] = set()
    taken = 0
    for digest in sorted(sizes):
        if taken < wanted and taken + sizes[digest] <= limit:
            chosen.add(digest)
            taken += sizes[digest]
    return chosen


def _ends(documents: Sequence[Document], share: float) -> Split:
    """Views of the documents: a text may be large, and is not copied."""
    whole = [(name, memoryview(content)) for name, content in documents]
    cuts = [character_start(content, round((1 - share) * len(content))) for _, content in whole]
    training = tuple(Document(name, content[:cut]) for (name, content), cut in zip(whole, cuts, strict=True))
    held_out = tuple(Document(name, content[cut:]) for (name, content), cut in zip(whole, cuts, strict=True))
    whose = "the document" if len(documents) == 1 else f"each of the {len(documents)} documents"
    return Split(training, held_out, f"the last {100 * share:.3g} % of {whose}")
