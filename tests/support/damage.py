"""Damage and forge files."""

import json
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tidegate._files import TensorFormat, _compute_digest, _digest_place, write_tensors


def flip(content: bytes, bit: int) -> bytes:
    """The content with one bit changed, counted from the beginning."""
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def some_flips(content: bytes, number: int, *, seed: int = 0) -> Iterator[bytes]:
    """The content with one bit changed, for so many bits drawn at random."""
    for bit in random.Random(seed).sample(range(8 * len(content)), number):
        yield flip(content, bit)


def flip_inside(path: Path, share: float = 0.5) -> None:
    """Change one bit of a file, at a share of its length."""
    content = path.read_bytes()
    path.write_bytes(flip(content, int(8 * len(content) * share)))


def forge_tensors(path, *, metadata=None, tensors=None, sealed=True):
    """Write a file of tensors again with changed entries; None removes one.

    sealed : whether the file gets a valid checksum
    """
    with safe_open(path, framework="pt") as file:
        held = file.metadata() | (metadata or {})
    state = load_file(path) | (tensors or {})
    kept = {name: tensor for name, tensor in state.items() if tensor is not None}
    held = {name: text for name, text in held.items() if text is not None}
    if not sealed:
        save_file(kept, path, metadata=held)
        return
    own = {name: text for name, text in held.items() if name not in ("format", "version", "digest")}
    form = TensorFormat(
        name=held["format"], version=held["version"], keys=frozenset(own), holds="forgery", writer="forge_tensors"
    )
    write_tensors(path, lambda file, texts: save_file(kept, file, metadata=texts), form, own, num_bytes=0)


def change_header(path: Path, change: Callable[[Any], Any]) -> None:
    """Write a safetensors file again with another header, as JSON or bytes, and with a valid checksum."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = change(json.loads(content[8 : 8 + length]))
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    with suppress(ValueError), path.open("r+b") as file:
        place = _digest_place(file, path)
        digest = _compute_digest(file, place)
        file.seek(place.start)
        file.write(digest.encode())


def change_metadata(path: Path, **texts: str) -> None:
    """Write a safetensors file again with changed metadata and a valid checksum."""
    change_header(path, lambda header: header | {"__metadata__": header["__metadata__"] | texts})
