"""Shards of tokens, as `tidegate tokenize` writes them: memory-mapped, so that they may exceed memory.

A folder of shards has an `index.json` with a checksum, raw little-endian integers in `00000.bin` and so on, and
`tokenizer.json` if its tokens are BPE tokens. The last part of each shard is held out.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
import numpy.typing as npt

from tidegate._files import write_content
from tidegate._json import add_checksum, content_hash, decode, parse_json, verify_checksum
from tidegate._validation import InputError

INDEX, TOKENIZER = "index.json", "tokenizer.json"
JOURNAL = "progress.jsonl"
"""Exists until all shards are written."""
_REMEDY = "Run tidegate tokenize again with the same options: it restores missing and damaged files."
_ORIGIN = ("source", "field", "shard_bytes")
"""Fields of an index that do not affect its tokens."""
_DTYPES = ("uint8", "uint16", "uint32")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One file of tokens."""

    name: str
    num_tokens: int
    num_training: int
    """Number of training tokens, at the start; the others are held out."""
    num_documents: int
    content: str
    """SHA-256 of the file."""
    text: str
    """SHA-256 of its text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardIndex:
    """The contents of a folder of shards."""

    tokenizer: str
    """`bytes` or `bpe:N`."""
    tokenizer_digest: str
    """SHA-256 of `tokenizer.json`; empty for bytes."""
    vocab_size: int
    dtype: Literal["uint8", "uint16", "uint32"]
    title: str
    """Name of the text."""
    source: str = ""
    """Location of the text, from `resolve_source`; empty in an index of an older version."""
    field: str | None = None
    """The field of JSON lines or datasets that holds the text."""
    shard_bytes: int = 0
    """Approximate size of a shard's text; 0 in an index of an older version."""
    shards: tuple[Shard, ...]
    kind: Literal["shards"] = "shards"

    @property
    def fingerprint(self) -> str:
        """Return a hash of all tokens, their order and the held-out part, as sixteen hexadecimal digits."""
        content = {name: value for name, value in asdict(self).items() if name not in _ORIGIN}
        return content_hash({**content, "title": "", "shards": [asdict(shard) for shard in self.shards]})


def shard_name(number: int) -> str:
    """Return the name of a shard's file."""
    return f"{number:05}.bin"


def holds_shards(folder: Path) -> bool:
    """Return whether a folder has shards, even damaged or unfinished ones: it must not be read as a folder of text."""
    index = folder / INDEX
    if (folder / shard_name(0)).is_file() and (index.is_file() or (folder / JOURNAL).is_file()):
        return True
    marks = {index: b'"kind": "shards"', folder / JOURNAL: b'"shard_bytes"'}
    return any(path.is_file() and mark in path.read_bytes() for path, mark in marks.items())


def write_index(folder: Path, index: ShardIndex) -> None:
    """Write the index, after all shards."""
    write_content(folder / INDEX, json.dumps(add_checksum(asdict(index)), indent=1).encode())


def read_index(folder: Path) -> ShardIndex:
    """Read the index, and verify the sizes of the shards without reading them.

    Raise InputError if a file is damaged, missing or truncated.
    """
    try:
        index: ShardIndex = decode(ShardIndex, verify_checksum(parse_json((folder / INDEX).read_bytes())))
    except FileNotFoundError:
        raise _damaged(folder / INDEX, "is missing: the shards are not finished") from None
    except ValueError as problem:
        raise _damaged(folder / INDEX, f"is damaged: {str(problem).rstrip('.')}") from None
    width = np.dtype(index.dtype).itemsize
    for shard in index.shards:
        path = folder / Path(shard.name).name
        size = path.stat().st_size if path.is_file() else 0
        if size != (expected := shard.num_tokens * width):
            raise _damaged(path, f"has {size:,} bytes instead of {expected:,}: it was truncated or replaced")
    if index.tokenizer_digest:
        tokenizer = folder / TOKENIZER
        if not tokenizer.is_file() or sha256(tokenizer.read_bytes()) != index.tokenizer_digest:
            raise _damaged(tokenizer, "is not the tokenizer of the shards")
    return index


def require_whole_shards(folder: Path, index: ShardIndex) -> None:
    """Read all shards once. Raise InputError for a shard with a wrong checksum."""
    for shard in index.shards:
        path = folder / shard.name
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != shard.content:
                raise _damaged(path, "has a wrong checksum: it was changed after it was written")


def _damaged(path: Path, state: str) -> InputError:
    return InputError("data", expected="a folder of intact shards", hint=f"{path} {state}. {_REMEDY}")


def tokenizer_text(folder: Path, index: ShardIndex) -> str:
    """Return the BPE tokenizer as JSON; empty for bytes."""
    return (folder / TOKENIZER).read_text(encoding="utf-8") if index.tokenizer_digest else ""


@final
class ShardedTokens:
    """Parts of several files as one stream with a length, indexed by arrays of positions."""

    def __init__(self, parts: list[npt.NDArray[np.unsignedinteger[Any]]]) -> None:
        self._parts = [part for part in parts if len(part)]
        self._ends = np.cumsum([len(part) for part in self._parts])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.unsignedinteger[Any]]:
        """Return the tokens at positions, in the shape of the positions."""
        flat = positions.reshape(-1)
        if flat.size and not 0 <= flat.min() <= flat.max() < len(self):
            raise IndexError(f"positions must be in [0, {len(self)}), got {flat.min()} to {flat.max()}.")
        owners = np.searchsorted(self._ends, flat, side="right")
        found = np.empty(flat.shape, dtype=self._parts[0].dtype)
        for owner in np.unique(owners):
            own = owners == owner
            start = self._ends[owner] - len(self._parts[owner])
            found[own] = self._parts[owner][flat[own] - start]
        return found.reshape(positions.shape)


def open_shards(folder: Path, index: ShardIndex) -> tuple[ShardedTokens, ShardedTokens]:
    """Map the training tokens and the held-out tokens."""
    maps, cuts = _map_shards(folder, index), [shard.num_training for shard in index.shards]
    return (
        ShardedTokens([tokens[:cut] for tokens, cut in zip(maps, cuts, strict=True)]),
        ShardedTokens([tokens[cut:] for tokens, cut in zip(maps, cuts, strict=True)]),
    )


def open_whole_shards(folder: Path, index: ShardIndex) -> ShardedTokens:
    """Map all tokens, including held-out ones, in the order of their text."""
    return ShardedTokens(_map_shards(folder, index))


def _map_shards(folder: Path, index: ShardIndex) -> list[npt.NDArray[np.unsignedinteger[Any]]]:
    dtype = f"<{np.dtype(index.dtype).str[1:]}"
    return [np.memmap(folder / shard.name, dtype=dtype, mode="r") for shard in index.shards]


def smallest_dtype(vocab_size: int) -> Any:
    """Return the name of the smallest integer type for a vocabulary."""
    return next(name for name in _DTYPES if vocab_size <= np.iinfo(name).max + 1)


def sha256(content: bytes) -> str:
    """Return the SHA-256 of bytes as hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()
