"""Tokenize text of any size into shards, in pieces and in several processes; an interrupted call can be resumed."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import asdict
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tidegate._files import write_content
from tidegate._json import add_checksum, decode, parse_json, verify_checksum
from tidegate._text import list_some
from tidegate._validation import InputError
from tidegate.lab.tasks.documents import Document, character_start, record_documents, text_files
from tidegate.lab.tasks.shards import (
    INDEX,
    JOURNAL,
    TOKENIZER,
    Shard,
    ShardIndex,
    sha256,
    shard_name,
    smallest_dtype,
    write_index,
)
from tidegate.lab.tasks.source import hub_documents, read_corpus, resolve_source, source_kind
from tidegate.lab.tasks.streams import num_held_out
from tidegate.lab.tasks.tokenizer import (
    Tokenizer,
    byte_tokenizer,
    num_merged_tokens,
    portable_tokenizer,
    read_tokenizer,
    trained_tokenizer,
)

SHARD_BYTES = 1 << 24
"""Approximate size of a shard's text."""
SAMPLE_BYTES = 1 << 26
"""Size of the text at the start on which a BPE tokenizer is trained."""
_HELD_OUT_SHARE = 0.05
_TOKENIZER_DIGEST = "pairs"
"""Key of the journal's lines about the tokenizer."""
_PARTIAL = r"(\.[0-9a-f]{16}\.partial)?"
"""Suffix of a file whose writer was killed."""
_SHARD_FILE = re.compile(rf"\d{{5,}}\.bin{_PARTIAL}")
_OWN_FILE = re.compile(
    rf"{_SHARD_FILE.pattern}|({'|'.join(re.escape(name) for name in (INDEX, JOURNAL, TOKENIZER))}){_PARTIAL}"
)


class EncoderLost(RuntimeError):  # noqa: N818, it names the event
    """An encoding process was killed; finished shards are kept."""


class _Job(NamedTuple):
    """The text of one shard."""

    number: int
    documents: list[Document]

    @property
    def digest(self) -> str:
        whole = hashlib.sha256()
        for document in self.documents:
            whole.update(len(document.content).to_bytes(8) + bytes(document.content))
        return whole.hexdigest()


def tokenize(
    data: str | None,
    folder: Path,
    *,
    tokenizer: str = "bytes",
    field: str | None = None,
    num_processes: int = 1,
    shard_bytes: int = SHARD_BYTES,
    report: Callable[[int, int], None] = lambda _shards, _tokens: None,
) -> ShardIndex:
    """Write a text as shards of tokens, or resume; return the index.

    Existing shards of the same text are kept if they are intact. A BPE tokenizer is trained on the first 64 MiB. If the
    text has changed, the shards that differ are written again, with the existing tokenizer.

    Args:
        data: As in `make_task`. Files are read in pieces, datasets are streamed.
        folder: The folder of the shards.
        tokenizer: `bytes`, `bpe:N`, or the path of a `tokenizer.json` from an earlier call.
        field: The field that holds the text in JSON lines and datasets.
        num_processes: Number of encoding processes.
        shard_bytes: Approximate size of a shard's text.
        report: Called after each shard with the number of shards and of tokens so far.

    Raises:
        InputError: The folder has shards of another source, field, tokenizer or `shard_bytes`, or the source cannot be
            opened. The folder does not change.
        EncoderLost: An encoding process was killed.
    """
    source = resolve_source("stdlib" if data is None else data)
    _require_own_folder(folder)
    given = _read_tokenizer_file(tokenizer) if tokenizer.endswith(".json") else ""
    num_tokens = None if given else num_merged_tokens(tokenizer)
    spelled = f"bpe:{_vocab_size(given)} {sha256(given.encode())}" if given else tokenizer
    options: dict[str, Any] = {"source": source, "field": field, "tokenizer": spelled, "shard_bytes": shard_bytes}
    journal = _Journal(folder / JOURNAL, options)
    jobs = _jobs(source, field, shard_bytes)
    # Read before anything is written: a source that cannot be opened must not change the folder.
    if (first := next(jobs, None)) is None:
        expected = "a text file, a folder of text files, or hf:NAME"
        raise InputError("data", expected=expected, got=data, hint="It contains no text.")
    folder.mkdir(parents=True, exist_ok=True)
    journal.begin()
    bpe = given
    if given:
        write_content(folder / TOKENIZER, given.encode())
    elif num_tokens:
        bpe = _kept_or_trained_tokenizer(source, field, folder, num_tokens, journal.tokenizer_digest)
    digest = sha256(bpe.encode()) if bpe else ""
    journal.note_tokenizer(digest)
    shards: list[Shard] = []
    try:
        spawn = multiprocessing.get_context("spawn")
        pool = None if num_processes == 1 else ProcessPoolExecutor(num_processes, mp_context=spawn)
        with pool or nullcontext():
            for shard in _encode_all(pool, chain([first], jobs), journal, folder, bpe, 2 * num_processes):
                shards.append(shard)
                report(len(shards), sum(one.num_tokens for one in shards))
    except BrokenProcessPool as problem:
        raise EncoderLost("An encoding process was killed, possibly for lack of memory.") from problem
    index = ShardIndex(
        **options,
        tokenizer_digest=digest,
        vocab_size=_vocab_size(bpe),
        dtype=smallest_dtype(_vocab_size(bpe)),
        title=Path(source).name or source,
        shards=tuple(shards),
    )
    # Shards of a text that was longer before, and partial files of killed writers.
    for file in folder.iterdir():
        if _SHARD_FILE.fullmatch(file.name) and file.name not in {shard.name for shard in shards}:
            file.unlink()
    write_index(folder, index)
    (folder / JOURNAL).unlink()
    return index


def _require_own_folder(folder: Path) -> None:
    """Raise InputError for a folder with other files, which might be overwritten."""
    names = sorted(file.name for file in folder.iterdir()) if folder.exists() else []
    others = [name for name in names if not _OWN_FILE.fullmatch(name)]
    # A process that is killed at the start leaves a partial journal.
    has_shards = any(name.startswith(JOURNAL) or _SHARD_FILE.fullmatch(name) for name in names)
    if others or (names and not has_shards and _done_index(folder / INDEX) is None):
        hint = f"It has other files: {list_some(others or names)}."
        raise InputError("out", expected="an empty folder or a folder of shards", got=folder, hint=hint)


def _encode_all(
    pool: ProcessPoolExecutor | None, jobs: Iterator[_Job], journal: _Journal, folder: Path, bpe: str, in_flight: int
) -> Iterator[Shard]:
    """Encode jobs in order; a pool gets at most `in_flight` jobs at once, which limits the text in memory."""
    if pool is None:
        for job in jobs:
            yield journal.find(job, folder) or journal.note(_write_shard(job, folder, bpe))
        return

    def wait(made: Shard | Future[Shard]) -> Shard:
        return made if isinstance(made, Shard) else journal.note(made.result())

    waiting: deque[Shard | Future[Shard]] = deque()
    for job in jobs:
        waiting.append(journal.find(job, folder) or pool.submit(_write_shard, job, folder, bpe))
        if len(waiting) >= in_flight:
            yield wait(waiting.popleft())
    yield from map(wait, waiting)


class _Journal:
    """The finished shards, a line each, until there is an index. Nothing is written before `begin`."""

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        self._path = path
        lines, done = _read_lines(path), _done_index(path.parent / INDEX)
        kept = [decode(Shard, line) for line in lines[1:] if _TOKENIZER_DIGEST not in line]
        kept = kept or list(done.shards if done else ())
        before = lines[0] if lines else {name: getattr(done, name) for name in options} if done else {}
        if changed := [name for name, value in before.items() if options[name] != value]:
            if kept:
                differences = ", ".join(f"{name} was {before[name]} and is {options[name]}" for name in changed)
                hint = f"It has shards made with other options: {differences}. Or use the same options."
                raise InputError("out", expected="another folder", got=path.parent, hint=hint)
            # The earlier call has no finished shard to lose.
            lines, done = [], None
        noted = [line[_TOKENIZER_DIGEST] for line in lines if _TOKENIZER_DIGEST in line]
        self.tokenizer_digest: str = noted[-1] if noted else done.tokenizer_digest if done else ""
        """SHA-256 of the tokenizer of an earlier call; empty if there is none."""
        self._shards = {shard.name: shard for shard in kept}
        self._lines = lines or [options, {_TOKENIZER_DIGEST: self.tokenizer_digest}, *map(asdict, kept)]

    def begin(self) -> None:
        """Write the lines of earlier calls, and remove the index until all shards are verified."""
        write_content(self._path, b"".join(map(_line_with_checksum, self._lines)))
        (self._path.parent / INDEX).unlink(missing_ok=True)

    def note_tokenizer(self, digest: str) -> None:
        """Append the tokenizer; shards made with another one are dropped."""
        if digest != self.tokenizer_digest:
            self._shards.clear()
        self._append({_TOKENIZER_DIGEST: digest})

    def find(self, job: _Job, folder: Path) -> Shard | None:
        """Return the shard of a job if it is intact and has the same text."""
        shard = self._shards.get(shard_name(job.number))
        if shard is None or shard.text != job.digest:
            return None
        path = folder / shard.name
        content = path.read_bytes() if path.is_file() else b""
        return shard if sha256(content) == shard.content else None

    def note(self, shard: Shard) -> Shard:
        """Append a finished shard."""
        self._append(asdict(shard))
        return shard

    def _append(self, line: dict[str, Any]) -> None:
        with self._path.open("ab") as file:
            file.write(_line_with_checksum(line))
            file.flush()
            os.fsync(file.fileno())


def _line_with_checksum(line: dict[str, Any]) -> bytes:
    return (json.dumps(add_checksum(line)) + "\n").encode()


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a journal before the first damaged one."""
    lines: list[dict[str, Any]] = []
    if path.exists():
        for line in path.read_bytes().split(b"\n")[:-1]:
            try:
                lines.append(verify_checksum(parse_json(line)))
            except ValueError:
                break
    return lines


def _done_index(path: Path) -> ShardIndex | None:
    """Return the index of finished shards, which are yet to be verified; None if it is missing or damaged."""
    try:
        return decode(ShardIndex, verify_checksum(parse_json(path.read_bytes())))
    except (ValueError, FileNotFoundError):
        return None


def _jobs(source: str, field: str | None, shard_bytes: int) -> Iterator[_Job]:
    """Split a source into the texts of shards; the splits depend only on the text."""
    number, documents, size = 0, list[Document](), 0
    for document in _pieces(source, field, shard_bytes):
        documents.append(document)
        size += len(document.content)
        if size >= shard_bytes:
            yield _Job(number, documents)
            number, documents, size = number + 1, [], 0
    if documents:
        yield _Job(number, documents)


def _pieces(source: str, field: str | None, piece_bytes: int) -> Iterator[Document]:
    """Yield the documents of a source; long files in pieces."""
    kind = source_kind(source)
    if kind == "hub":
        yield from hub_documents(source.removeprefix("hf:"), field or "text", streaming=True)
    elif kind == "embedded":
        corpus = read_corpus(source, field)
        yield from (*corpus.documents, *(corpus.held_out or ()))
    elif kind == "files":
        for name, path in text_files(source):
            if path.suffix == ".jsonl":
                yield from record_documents(path, name, field or "text")
            else:
                yield from _file_pieces(path, name, piece_bytes)
    else:
        hint = "It is already tokenized: pass it to tidegate train."
        raise InputError("data", expected="text", got=Path(source), hint=hint)


def _file_pieces(path: Path, name: str, piece_bytes: int) -> Iterator[Document]:
    """Yield a file in pieces that end after a line, or after a character if a line is longer than a piece."""
    with path.open("rb") as file:
        rest = b""
        while block := file.read(piece_bytes):
            content = rest + block
            cut = content.rfind(b"\n") + 1 or character_start(content, len(content) - 3 if len(content) > 3 else 0)
            whole, rest = (content[:cut], content[cut:]) if len(block) == piece_bytes else (content, b"")
            if whole:
                yield Document(name, whole)
        if rest:
            yield Document(name, rest)


def _read_tokenizer_file(path: str) -> str:
    """Return the tokenizer in a file, as JSON."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        read_tokenizer(text, 0)
    except OSError as problem:
        raise InputError("tokenizer", expected="readable", got=path, hint=f"{problem.strerror}.") from None
    # The library raises plain exceptions.
    except Exception as problem:
        raise InputError("tokenizer", expected="the JSON of a tokenizer", got=path, hint=f"{problem}.") from None
    return text


def _kept_or_trained_tokenizer(source: str, field: str | None, folder: Path, num_tokens: int, digest: str) -> str:
    """Return the tokenizer in the folder if it has this digest, else train one and write it there; as JSON."""
    kept = folder / TOKENIZER
    if digest and kept.is_file() and sha256(kept.read_bytes()) == digest:
        return kept.read_text(encoding="utf-8")
    sample, size = list[Document](), 0
    for document in _pieces(source, field, SHARD_BYTES):
        sample.append(document)
        size += len(document.content)
        if size >= SAMPLE_BYTES:
            break
    bpe = portable_tokenizer(trained_tokenizer(sample, num_tokens).merges.to_str())
    write_content(kept, bpe.encode())
    return bpe


def _vocab_size(bpe: str) -> int:
    return len(_load(bpe).token_bytes)


@lru_cache(maxsize=2)
def _load(bpe: str) -> Tokenizer:
    return read_tokenizer(bpe, 0) if bpe else byte_tokenizer()


def _write_shard(job: _Job, folder: Path, bpe: str) -> Shard:
    """Encode the text of a shard and write its file."""
    encoder = _load(bpe)
    dtype = np.dtype(smallest_dtype(len(encoder.token_bytes))).newbyteorder("<")
    tokens = encoder.encode(job.documents).astype(dtype)
    content = tokens.tobytes()
    name = shard_name(job.number)
    write_content(folder / name, content)
    held_out = num_held_out(len(tokens), share=_HELD_OUT_SHARE, at_least=0)
    return Shard(
        name=name,
        num_tokens=len(tokens),
        num_training=len(tokens) - held_out,
        num_documents=len(job.documents),
        content=sha256(content),
        text=job.digest,
    )
