"""Write files atomically, and safetensors files with a checksum of all their bytes."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedRandom, BufferedReader
from pathlib import Path
from typing import TypeAlias

from tidegate._json import decode, parse_json
from tidegate._text import list_some, short_repr, shorten
from tidegate._validation import InputError

StrPath: TypeAlias = str | os.PathLike[str]
OpenFile: TypeAlias = BufferedReader | BufferedRandom

_BLANK = "0" * 64
_DIGEST = re.compile(rb'"digest":"([0-9a-f]{64})"')
"""As safetensors writes it; inside a string of the header the quotes would be escaped."""
_PARTIAL = re.compile(r".+\.[0-9a-f]{16}\.partial|\.tmp[A-Za-z0-9]{6}")
"""Names of files that are being written, by `write_atomically` and by safetensors."""
_LENGTH_BYTES = 8
_LONGEST_HEADER = 2**25
_MOST_LISTED = 20


def write_atomically(
    path: StrPath, write: Callable[[Path], object], *, num_bytes: int | None = None, previous: Path | None = None
) -> None:
    """Write a temporary file and move it into place, so that there is never an incomplete file at the path.

    After an error the temporary file is removed, and the old file is still at the path or at `previous`. An `OSError`
    names the file. A killed process may leave a `<name>.<random>.partial` behind. The file gets the mode of the umask.

    Args:
        path: In an existing directory.
        write: Writes to a path, an empty file that it may replace.
        num_bytes: The approximate size, for the error of a full disk.
        previous: Where to move the old file; None removes it.
    """
    path = Path(path)
    # Moving a file there would replace the device itself, such as /dev/null.
    if path.exists() and (kind := nonregular_file_type(path)) not in ("", "a directory"):
        raise InputError("path", expected="a regular file, or a new one", got=path, hint=f"It is {kind}.")
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with explain_os_errors(path, num_bytes):
            temporary.touch()
            mode = temporary.stat().st_mode
            write(temporary)
            # safetensors replaces the file by one that only its owner may read.
            if temporary.stat().st_mode != mode:
                temporary.chmod(stat.S_IMODE(mode))
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            if previous is not None:
                # Another process may have moved it, if its machine was disconnected and the run resumed elsewhere.
                with suppress(FileNotFoundError):
                    path.replace(previous)
            temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove_partial_files(folder: StrPath) -> None:
    """Remove the temporary files of killed writers in a folder, from `write_atomically` and safetensors.

    No other process may be writing there. A folder that does not exist is ignored.
    """
    for file in Path(folder).glob("*"):
        if _PARTIAL.fullmatch(file.name) and file.is_file():
            file.unlink(missing_ok=True)


def write_content(path: StrPath, content: bytes) -> None:
    """Write bytes with `write_atomically`."""
    write_atomically(path, lambda file: file.write_bytes(content), num_bytes=len(content))


def fix_permissions(folder: StrPath) -> None:
    """Give weights that transformers wrote the file mode of `config.json`: safetensors makes them private."""
    for file in Path(folder).glob("model*.safetensors"):
        shutil.copymode(Path(folder) / "config.json", file)


@contextmanager
def explain_os_errors(path: StrPath, num_bytes: int | None = None) -> Generator[None]:
    """Add the file to an `OSError` of writing and, on a full disk, the needed and the free space."""
    try:
        yield
    except OSError as error:
        words = f"{path} could not be written: {error.strerror or error}."
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            needed = "" if num_bytes is None else f"{_format_size(num_bytes)} are needed, "
            folder = next(parent for parent in Path(path).absolute().parents if parent.is_dir())
            free = _format_size(shutil.disk_usage(folder).free)
            words = f"{words} {needed}{free} are free. Free space, or choose another place."
        # With a single argument, the message does not start with the number.
        explained = (type(error) if type(error).__module__ == "builtins" else OSError)(words)
        explained.errno = error.errno
        raise explained from error


def _format_size(num_bytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorFormat:
    """One kind of safetensors file that this library writes."""

    name: str
    """Its `format` in the metadata."""
    version: str
    keys: frozenset[str]
    """The other keys of the metadata, besides the digest."""
    holds: str
    """The contents in words, such as "Tidegate model"."""
    writer: str
    """The function that writes such files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorHeader:
    """The header of a file of tensors."""

    metadata: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    """As safetensors names them, such as `F32`."""
    digest: str
    """Of the whole file."""


@dataclass(frozen=True, slots=True)
class _TensorEntry:
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def write_tensors(
    path: StrPath,
    save: Callable[[Path, dict[str, str]], object],
    form: TensorFormat,
    metadata: Mapping[str, str],
    *,
    num_bytes: int,
    previous: Path | None = None,
) -> str:
    """Write a safetensors file with a digest of all its bytes in its metadata, and return the digest.

    The digest is computed with 64 zeros in its own place. Equal tensors and metadata give equal bytes.

    Args:
        path: Of the file.
        save: Writes the tensors with some metadata to a path.
        form: The format.
        metadata: The values of the format's keys.
        num_bytes: The approximate size, for the error of a full disk.
        previous: Where to move the old file; None removes it.
    """
    assert set(metadata) == form.keys
    whole = {"format": form.name, "version": form.version, **metadata, "digest": _BLANK}
    digest = ""

    def write(file: Path) -> None:
        nonlocal digest
        try:
            save(file, whole)
        except Exception as error:
            # safetensors raises its own error for system errors.
            if (number := re.search(r"\(os error (\d+)\)", str(error))) is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        with file.open("r+b") as opened:
            _sort_metadata(opened, path)
            place = _digest_place(opened, path)
            digest = _compute_digest(opened, place)
            opened.seek(place.start)
            opened.write(digest.encode())

    write_atomically(path, write, num_bytes=num_bytes, previous=previous)
    return digest


def read_tensor_header(path: StrPath, form: TensorFormat) -> TensorHeader:
    """Return the header of a file after comparing its digest with all of its bytes; no tensor is loaded.

    Raises:
        InputError: If it is not a file of this format, or was changed or damaged.
    """
    if kind := nonregular_file_type(path):
        inside = sorted(Path(path).glob("*.safetensors")) if kind == "a directory" else []
        such_as = f", such as {inside[0]}" if inside else ""
        raise path_error(path, "a file", f"It is {kind}. Name a file that {form.writer} wrote{such_as}.")
    with Path(path).open("rb") as file:
        metadata, entries = _parse_header(_header(file, path), path)
        _require_format(metadata, path, form)
        place = _digest_place(file, path)
        if metadata["digest"] != _compute_digest(file, place):
            remedy = f"Restore a copy, or write it again with {form.writer}."
            raise path_error(path, f"a file of {form.writer}", f"It is damaged: checksum mismatch. {remedy}")
    return TensorHeader(
        metadata=metadata,
        shapes={name: entry.shape for name, entry in entries.items()},
        dtypes={name: entry.dtype for name, entry in entries.items()},
        digest=metadata["digest"],
    )


def path_error(path: StrPath, expected: str, hint: str) -> InputError:
    """Return the error about a file; as a Path it is shown in full, however long it is."""
    return InputError("path", expected=expected, got=Path(path), hint=hint)


def _header(file: OpenFile, path: StrPath) -> bytes:
    """Return the JSON at the beginning of a safetensors file."""
    file.seek(0)
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    header = file.read(length) if length <= _LONGEST_HEADER else b""
    if len(header) != length or not header.startswith(b"{"):
        raise path_error(path, "a safetensors file", "Its header is missing or incomplete.")
    return header


def _sort_metadata(file: OpenFile, path: StrPath) -> None:
    """Sort the metadata by name: safetensors writes them in a different order each time."""
    header = _header(file, path)
    content = parse_json(header)
    content["__metadata__"] = dict(sorted(content["__metadata__"].items()))
    ordered = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode().ljust(len(header))
    # The position of the tensors depends on the header's length.
    assert len(ordered) == len(header)
    file.seek(_LENGTH_BYTES)
    file.write(ordered)


def _parse_header(header: bytes, path: StrPath) -> tuple[dict[str, str], dict[str, _TensorEntry]]:
    try:
        content = parse_json(header)
        metadata = decode(dict[str, str], content.pop("__metadata__", {}), where="__metadata__")
        return metadata, decode(dict[str, _TensorEntry], content)
    except ValueError as problem:
        raise path_error(path, "a safetensors file", str(problem)) from None


def _require_format(metadata: Mapping[str, str], path: StrPath, form: TensorFormat) -> None:
    if metadata.get("format") != form.name:
        hint = f"Its format is {short_repr(metadata.get('format'))}, not {form.name!r}. Write it with {form.writer}."
        raise path_error(path, f"a file with {form.holds}", hint)
    if metadata.get("version") != form.version:
        hint = f"It has version {short_repr(metadata.get('version'))}. Load it with the release that wrote it, or "
        raise path_error(path, f"a file of format version {form.version!r}", f"{hint}rewrite it with {form.writer}.")
    known = {"format", "version", "digest", *form.keys}
    if set(metadata) != known:
        differing = list_some([shorten(name) for name in sorted(known.symmetric_difference(metadata))])
        hint = f"{differing} is missing or unknown. Write it with {form.writer}."
        raise path_error(path, f"a file with the metadata {', '.join(sorted(known))}", hint)


def _digest_place(file: OpenFile, path: StrPath) -> slice:
    """Return the position of the digest in the file."""
    found = list(_DIGEST.finditer(_header(file, path)))
    if len(found) != 1:
        raise path_error(path, "a file with one digest", f"It is damaged: it has {len(found)}.")
    return slice(_LENGTH_BYTES + found[0].start(1), _LENGTH_BYTES + found[0].end(1))


def _compute_digest(file: OpenFile, place: slice) -> str:
    """Hash a file piece by piece, with zeros in the place of its digest."""
    file.seek(0)
    digest = hashlib.sha256(file.read(place.start))
    digest.update(_BLANK.encode())
    file.seek(place.stop)
    return hashlib.file_digest(file, lambda: digest).hexdigest()


def require_shapes(
    given: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], *, complaint: str
) -> None:
    """Raise ValueError for names or shapes that differ; it lists the first twenty after the complaint."""
    found = [
        *(f"{shorten(name)} is missing" for name in expected if name not in given),
        *(f"{shorten(name)} is unexpected" for name in given if name not in expected),
        *(
            f"{shorten(name)} has shape {short_repr(given[name])}, expected {shape}"
            for name, shape in expected.items()
            if name in given and given[name] != shape
        ),
    ]
    if found:
        more = f"; and {len(found) - _MOST_LISTED:,} more" if len(found) > _MOST_LISTED else ""
        raise ValueError(f"{complaint}: {'; '.join(found[:_MOST_LISTED])}{more}.")


def nonregular_file_type(path: StrPath) -> str:
    """Return the type of a file that is not regular, such as "a named pipe"; an empty string for a regular file.

    Links are followed; OSError if nothing is there. Reading a file that is not regular may block or never end.
    """
    mode = Path(path).stat().st_mode
    if stat.S_ISREG(mode):
        return ""
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")
