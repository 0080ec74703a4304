"""What `data` means for text: the embedded corpus, files, token arrays or a dataset on the hub."""

from __future__ import annotations

import hashlib
import platform
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from tidegate._validation import InputError
from tidegate.lab.tasks.corpus import embedded_corpus
from tidegate.lab.tasks.documents import Document, exists, expand_home, file_documents, fingerprint, is_pattern
from tidegate.lab.tasks.hub import hub_documents
from tidegate.lab.tasks.shards import holds_shards

EMBEDDED = "stdlib"
"""The source that needs no path."""

_HUB = "hf:"
_EXPECTED = "a file, a folder, a pattern or hf:NAME"
_FIELD_HINT = "It is for JSON lines and datasets."

SourceKind: TypeAlias = Literal["embedded", "files", "tokens", "shards", "hub"]


class Corpus(NamedTuple):
    """Text, as documents."""

    documents: tuple[Document, ...]
    held_out: tuple[Document, ...] | None
    """Documents that are held out; None if they are still to be chosen among `documents`."""
    fingerprint: str
    title: str
    """What it is, as the subject of a sentence."""
    missing: tuple[str, ...] = ()
    """Names that were looked for and not found."""


class TokenFile(NamedTuple):
    """Tokens that were made elsewhere, mapped from the disk."""

    tokens: npt.NDArray[np.integer[Any]]
    vocab_size: int
    fingerprint: str
    title: str


def source_kind(source: str) -> SourceKind:
    """Decide which of the five kinds a source is; what is neither there nor looks like a path is a name on the hub."""
    if not source:
        raise InputError("data", expected=_EXPECTED, got=source)
    if source == EMBEDDED:
        return "embedded"
    if source.startswith(_HUB):
        return "hub"
    path = expand_home(source)
    if exists(path) or is_pattern(str(path)):
        if path.is_dir() and holds_shards(path):
            return "shards"
        return "tokens" if path.suffix == ".npy" and path.is_file() else "files"
    if _looks_like_path(source, path):
        raise InputError("data", expected=_EXPECTED, got=source, hint="It does not exist.")
    return "hub"


def resolve_source(source: str) -> str:
    """Return the source as any process can find it: paths made absolute."""
    if source_kind(source) == "embedded":
        return source
    if source_kind(source) == "hub":
        return _HUB + source.removeprefix(_HUB)
    return str(expand_home(source).absolute())


def read_corpus(source: str, field: str | None) -> Corpus:
    """The documents of a source that is text; `field` names where JSON lines and datasets have it, "text" if None."""
    kind = source_kind(source)
    if kind in ("tokens", "shards"):
        raise InputError("tokenizer", expected=f"'none' for {source}, which holds tokens and not text")
    if kind == "embedded" and field is not None:
        raise InputError("field", expected="left out for the embedded corpus", got=field, hint=_FIELD_HINT)
    if kind == "embedded":
        training, held_out, missing = embedded_corpus()
        title = f"sources of the standard library of Python {platform.python_version()}"
        return Corpus(training, held_out, fingerprint(training, held_out), title, missing)
    read = hub_documents if kind == "hub" else file_documents
    documents = read(source.removeprefix(_HUB), field or "text")
    if field is not None and kind == "files" and not any(".jsonl:" in document.name for document in documents):
        raise InputError("field", expected=f"left out for {source}", got=field, hint=_FIELD_HINT)
    return Corpus(documents, None, fingerprint(documents), _title(source, documents))


_LARGEST_VOCABULARY = 1 << 22


def read_tokens(source: str) -> TokenFile:
    """The whole numbers of a one-dimensional `.npy` file, mapped and not read into memory."""
    path = Path(source)
    try:
        with warnings.catch_warnings(action="ignore"):
            tokens: Any = np.lib.format.open_memmap(source, mode="r")
    # The header is read as a Python literal, whose faults raise errors of many classes.
    except Exception as error:
        reason = str(error).rstrip(".") or type(error).__name__
        raise InputError("data", expected="a NumPy array", got=path, hint=f"{reason}.") from error
    if tokens.dtype.kind not in "iu" or tokens.ndim != 1:
        hint = f"It has {tokens.ndim} dimensions of {tokens.dtype}."
        raise InputError("data", expected="a one-dimensional array of integers, one a token", got=path, hint=hint)
    if tokens.size == 0:
        raise InputError("data", expected="one token or more", got=path, hint="It is empty.")
    if (lowest := int(tokens.min())) < 0:
        raise InputError("data", expected="tokens of at least 0", got=path, hint=f"It has {lowest}.")
    if (largest := int(tokens.max())) >= _LARGEST_VOCABULARY:
        hint = f"It has {largest:,}. Number the tokens from 0 on, without gaps."
        raise InputError("data", expected=f"tokens below {_LARGEST_VOCABULARY:,}", got=path, hint=hint)
    digest = hashlib.sha256(f"{tokens.dtype.str} ".encode())
    digest.update(tokens)
    return TokenFile(tokens, largest + 1, digest.hexdigest()[:16], path.name)


def _looks_like_path(source: str, path: Path) -> bool:
    """Whether a source is meant as a path: it is absolute, has an ending, or begins with a folder that exists."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(@[\w.-]+)?", source, re.ASCII):
        return True
    # Names on the hub end in versions, v1.2, and files in letters.
    return source.startswith(".") or path.suffix[1:2].isalpha() or (len(path.parts) > 1 and path.parent.is_dir())


def _title(source: str, documents: Sequence[Document]) -> str:
    if source.startswith(_HUB):
        return f"the dataset {source.removeprefix(_HUB)}"
    name = Path(source).name
    return name if len(documents) == 1 else f"{len(documents)} documents of {name}"
