"""Tokens on the disk in shards, as `tidegate tokenize` writes them: mapped and not read, so they may exceed memory.

A folder of shards has `index.json`, which is sealed by a digest, raw little-endian numbers in `00000.bin` and so on,
and `tokenizer.json` if its tokens are byte pairs. The last part of each shard is held out.
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
"""There until all shards are."""
_REMEDY = "Run tidegate tokenize again with the same options: it makes anew what is missing or damaged."
_ORIGIN = ("source", "field", "shard_bytes")
"""Fields of an index that say how it came about, and nothing of its tokens."""
_DTYPES = ("uint8", "uint16", "uint32")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One file of tokens."""

    name: str
    num_tokens: int
    num_training: int
    """The first tokens, which are trained on; the others are held out."""
    num_documents: int
    content: str
    """SHA-256 of the file."""
    text: str
    """SHA-256 of the text that it was made of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardIndex:
    """What a folder of shards holds."""

    tokenizer: str
    """`bytes` or `bpe:N`."""
    tokenizer_digest: str
    """SHA-256 of `tokenizer.json`; empty for bytes."""
    vocab_size: int
    dtype: Literal["uint8", "uint16", "uint32"]
    title: str
    """The text that they were made of."""
    source: str = ""
    """Where that text was, as `resolve_source` gives it; empty in the index of an older version."""
    field: str | None = None
    """The field of its records that it was read from."""
    shard_bytes: int = 0
    """Text of a shard, about; 0 in the index of an older version."""
    shards: tuple[Shard, ...]
    kind: Literal["shards"] = "shards"

    @property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits that stand for all tokens, their order and what is held out."""
        content = {name: value for name, value in asdict(self).items() if name not in _ORIGIN}
        return content_hash({**content, "title": "", "shards": [asdict(shard) for shard in self.shards]})


def shard_name(number: int) -> str:
    """The name of a shard's file."""
    return f"{number:05}.bin"


def holds_shards(folder: Path) -> bool:
    """Whether a folder has shards, or was to have some: damaged or unfinished, it must not pass for one of texts."""
    index = folder / INDEX
    if (folder / shard_name(0)).is_file() and (index.is_file() or (folder / JOURNAL).is_file()):
        return True
    return _mentions(index, b'"kind": "shards"') or _mentions(folder / JOURNAL, b'"shard_bytes"')


def _mentions(path: Path, words: bytes) -> bool:
    return path.is_file() and words in path.read_bytes()


def write_index(folder: Path, index: ShardIndex) -> None:
    """Write the index, which makes shards of the files beside it."""
    write_content(folder / INDEX, json.dumps(add_checksum(asdict(index)), indent=1).encode())


def read_index(folder: Path) -> ShardIndex:
    """Read the index, and see that the files beside it have the sizes that it says; their bytes are not read.

    Raise InputError for what is damaged, missing or cut short.
    """
    try:
        index: ShardIndex = decode(ShardIndex, verify_checksum(parse_json((folder / INDEX).read_bytes())))
    except FileNotFoundError:
        raise _damaged(folder / INDEX, "is not there: the shards are not finished") from None
    except ValueError as problem:
        raise _damaged(folder / INDEX, f"is damaged: {str(problem).rstrip('.')}") from None
    width = np.dtype(index.dtype).itemsize
    for shard in index.shards:
        path = folder / Path(shard.name).name
        size = path.stat().st_size if path.is_file() else 0
        if size != shard.num_tokens * width:
            expected = shard.num_tokens * width
            raise _damaged(path, f"has {size:,} bytes and not {expected:,}: it was cut short or replaced")
    if index.tokenizer_digest:
        tokenizer = folder / TOKENIZER
        if not tokenizer.is_file() or sha256(tokenizer.read_bytes()) != index.tokenizer_digest:
            raise _damaged(tokenizer, "is not the tokenizer that the shards were made with")
    return index


def require_whole_shards(folder: Path, index: ShardIndex) -> None:
    """Read all shards once, a piece at a time; raise InputError for one that does not have its digest."""
    for shard in index.shards:
        path = folder / shard.name
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != shard.content:
                raise _damaged(path, "does not fit its digest: it was changed after it was written")


def _damaged(path: Path, state: str) -> InputError:
    return InputError("data", expected="whole shards", hint=f"{path} {state}. {_REMEDY}")


def tokenizer_text(folder: Path, index: ShardIndex) -> str:
    """The byte pairs as JSON; empty for bytes."""
    return (folder / TOKENIZER).read_text(encoding="utf-8") if index.tokenizer_digest else ""


@final
class ShardedTokens:
    """Parts of several files as one stream: it has a length, and gives the tokens at an array of places."""

    def __init__(self, parts: list[npt.NDArray[np.unsignedinteger[Any]]]) -> None:
        self._parts = [part for part in parts if len(part)]
        self._ends = np.cumsum([len(part) for part in self._parts])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.unsignedinteger[Any]]:
        """The tokens at places from 0 on, in the shape of the places."""
        flat = places.reshape(-1)
        if flat.size and not 0 <= flat.min() <= flat.max() < len(self):
            raise IndexError(f"places must lie from 0 on below {len(self)}; got {flat.min()} to {flat.max()}.")
        owners = np.searchsorted(self._ends, flat, side="right")
        found = np.empty(flat.shape, dtype=self._parts[0].dtype)
        for owner in np.unique(owners):
            own = owners == owner
            start = self._ends[owner] - len(self._parts[owner])
            found[own] = self._parts[owner][flat[own] - start]
        return found.reshape(places.shape)


def open_shards(folder: Path, index: ShardIndex) -> tuple[ShardedTokens, ShardedTokens]:
    """Map what is trained on and what is held out."""
    maps, cuts = _map_shards(folder, index), [shard.num_training for shard in index.shards]
    return (
        ShardedTokens([tokens[:cut] for tokens, cut in zip(maps, cuts, strict=True)]),
        ShardedTokens([tokens[cut:] for tokens, cut in zip(maps, cuts, strict=True)]),
    )


def open_whole_shards(folder: Path, index: ShardIndex) -> ShardedTokens:
    """Map all tokens in the order of their text, those that are held out among them."""
    return ShardedTokens(_map_shards(folder, index))


def _map_shards(folder: Path, index: ShardIndex) -> list[npt.NDArray[np.unsignedinteger[Any]]]:
    dtype = f"<{np.dtype(index.dtype).str[1:]}"
    return [np.memmap(folder / shard.name, dtype=dtype, mode="r") for shard in index.shards]


def smallest_dtype(vocab_size: int) -> Any:
    """The name of the smallest type that holds a vocabulary."""
    return next(name for name in _DTYPES if vocab_size <= np.iinfo(name).max + 1)


def sha256(content: bytes) -> str:
    """Return the SHA-256 of bytes, in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()
