"""Text of any size to shards of tokens: read a piece at a time, encoded in several processes, resumed after a stop."""

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
from contextlib import AbstractContextManager, nullcontext
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
"""Text of a shard, about."""
SAMPLE_BYTES = 1 << 26
"""Text from which byte pairs are learnt, from the beginning on."""
_HELD_OUT_SHARE = 0.05
_PAIRS = "pairs"
"""What the journal's line about byte pairs has."""
_PARTIAL = r"(\.[0-9a-f]{16}\.partial)?"
"""What a kill leaves of a file that was being written."""
_SHARD_FILE = re.compile(rf"\d{{5,}}\.bin{_PARTIAL}")
_OWN_FILE = re.compile(
    rf"{_SHARD_FILE.pattern}|({'|'.join(re.escape(name) for name in (INDEX, JOURNAL, TOKENIZER))}){_PARTIAL}"
)


class EncoderLost(RuntimeError):  # noqa: N818, it tells of a process that is gone
    """One of the processes that encode was ended; shards that are done are kept."""


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
    """Write a text as shards of tokens, or go on with it; return the index.

    Shards that are there, whole and made of the same text, are kept. Byte pairs are learnt from the first 64 MiB.
    Where the text of the same source has changed, its shards are made anew, with the byte pairs that are there.

    data          : what `make_task` takes; files are read a piece at a time, datasets are streamed
    tokenizer     : `bytes`, `bpe:N`, or the path of a `tokenizer.json` that was written here
    num_processes : that encode
    shard_bytes   : text of a shard, about
    report        : is told after each shard how many there are, and how many tokens they have

    Raises:
        InputError: The folder has shards of another source, field, tokenizer or `shard_bytes`, or the source cannot be
            opened; the folder is then as it was.
        EncoderLost: after a process that encodes was killed.
    """
    source = resolve_source("stdlib" if data is None else data)
    _require_own_folder(folder)
    given = _read_pairs(tokenizer) if tokenizer.endswith(".json") else ""
    num_tokens = None if given else num_merged_tokens(tokenizer)
    spelled = f"bpe:{_vocab_size(given)} {sha256(given.encode())}" if given else tokenizer
    options: dict[str, Any] = {"source": source, "field": field, "tokenizer": spelled, "shard_bytes": shard_bytes}
    journal = _Journal(folder / JOURNAL, options)
    jobs = _jobs(source, field, shard_bytes)
    # Read before anything is written: a source that cannot be opened must not change the folder.
    if (first := next(jobs, None)) is None:
        expected = "a file with text in it, a folder of such files, or hf:NAME"
        raise InputError("data", expected=expected, got=data, hint="It holds no text.")
    folder.mkdir(parents=True, exist_ok=True)
    journal.begin()
    pairs = given or (_learn_pairs(source, field, folder, num_tokens, journal.pairs_digest) if num_tokens else "")
    if given:
        write_content(folder / TOKENIZER, given.encode())
    journal.note_pairs(pairs)
    shards: list[Shard] = []
    try:
        with _encoders(num_processes) as pool:
            for shard in _encode_all(pool, chain([first], jobs), journal, folder, pairs, 2 * num_processes):
                shards.append(shard)
                report(len(shards), sum(one.num_tokens for one in shards))
    except BrokenProcessPool as problem:
        raise EncoderLost("A process that encodes was ended, possibly for lack of memory.") from problem
    index = ShardIndex(
        **options,
        tokenizer_digest=sha256(pairs.encode()) if pairs else "",
        vocab_size=_vocab_size(pairs),
        dtype=smallest_dtype(_vocab_size(pairs)),
        title=Path(source).name or source,
        shards=tuple(shards),
    )
    # Shards of a text that was longer before, and what kills have left half written.
    for file in folder.iterdir():
        if _SHARD_FILE.fullmatch(file.name) and file.name not in {shard.name for shard in shards}:
            file.unlink()
    write_index(folder, index)
    journal.forget()
    return index


def _require_own_folder(folder: Path) -> None:
    """Raise InputError for a folder with files that are not of shards: some would be written over."""
    names = sorted(file.name for file in folder.iterdir()) if folder.exists() else []
    others = [name for name in names if not _OWN_FILE.fullmatch(name)]
    # A kill at the very beginning leaves a journal that is half written.
    has_shards = any(name.startswith(JOURNAL) or _SHARD_FILE.fullmatch(name) for name in names)
    if others or (names and not has_shards and _done_index(folder / INDEX) is None):
        hint = f"It has files that are not of shards: {list_some(others or names)}."
        raise InputError("out", expected="a folder for shards alone", got=folder, hint=hint)


def _encoders(num_processes: int) -> AbstractContextManager[ProcessPoolExecutor | None]:
    """Processes that encode; None where this one is enough."""
    if num_processes == 1:
        return nullcontext()
    return ProcessPoolExecutor(num_processes, mp_context=multiprocessing.get_context("spawn"))


def _encode_all(
    pool: ProcessPoolExecutor | None, jobs: Iterator[_Job], journal: _Journal, folder: Path, pairs: str, in_flight: int
) -> Iterator[Shard]:
    """Encode jobs in their order; of a pool's jobs a few at a time, so that memory holds a few shards' text alone."""
    if pool is None:
        for job in jobs:
            yield journal.find(job, folder) or journal.note(_write_shard(job, folder, pairs))
        return

    def wait(made: Shard | Future[Shard]) -> Shard:
        return made if isinstance(made, Shard) else journal.note(made.result())

    waiting: deque[Shard | Future[Shard]] = deque()
    for job in jobs:
        waiting.append(journal.find(job, folder) or pool.submit(_write_shard, job, folder, pairs))
        if len(waiting) >= in_flight:
            yield wait(waiting.popleft())
    yield from map(wait, waiting)


class _Journal:
    """The shards that are done, a sealed line each, until there is an index. `begin` is the first to write."""

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        self._path = path
        lines, done = _sealed_lines(path), _done_index(path.parent / INDEX)
        kept = [decode(Shard, line) for line in lines[1:] if _PAIRS not in line] or list(done.shards if done else ())
        before = lines[0] if lines else {name: getattr(done, name) for name in options} if done else {}
        if changed := [name for name, value in before.items() if options[name] != value]:
            if kept:
                differences = ", ".join(f"{name} was {before[name]} and is {options[name]}" for name in changed)
                hint = f"It has shards of another call: {differences}. Or use the same options."
                raise InputError("out", expected="another folder", got=path.parent, hint=hint)
            # Another call ended before its first shard: there is nothing to lose.
            lines, done = [], None
        noted = [line[_PAIRS] for line in lines if _PAIRS in line]
        self.pairs_digest: str = noted[-1] if noted else done.tokenizer_digest if done else ""
        """SHA-256 of the byte pairs of a call before this one; empty if there are none."""
        self._shards = {shard.name: shard for shard in kept}
        self._lines = lines or [options, {_PAIRS: self.pairs_digest}, *map(asdict, kept)]

    def begin(self) -> None:
        """Write what is known of a call before this one; until all shards are checked there is no index."""
        write_content(self._path, b"".join(map(_sealed_line, self._lines)))
        (self._path.parent / INDEX).unlink(missing_ok=True)

    def note_pairs(self, pairs: str) -> None:
        """Write down the byte pairs; shards that were made with others are not kept."""
        digest = sha256(pairs.encode()) if pairs else ""
        if digest != self.pairs_digest:
            self._shards.clear()
        self.pairs_digest = digest
        self._append({_PAIRS: digest})

    def find(self, job: _Job, folder: Path) -> Shard | None:
        """Return a job's shard if it is there, whole and made of the same text."""
        shard = self._shards.get(shard_name(job.number))
        if shard is None or shard.text != job.digest:
            return None
        path = folder / shard.name
        content = path.read_bytes() if path.is_file() else b""
        return shard if sha256(content) == shard.content else None

    def note(self, shard: Shard) -> Shard:
        """Write down that a shard is done."""
        self._append(asdict(shard))
        return shard

    def forget(self) -> None:
        """Remove the journal: the index has all of it."""
        self._path.unlink(missing_ok=True)

    def _append(self, line: dict[str, Any]) -> None:
        with self._path.open("ab") as file:
            file.write(_sealed_line(line))
            file.flush()
            os.fsync(file.fileno())


def _sealed_line(line: dict[str, Any]) -> bytes:
    return (json.dumps(add_checksum(line)) + "\n").encode()


def _sealed_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a journal; what a kill cut off, and all after it, is left out."""
    lines: list[dict[str, Any]] = []
    if path.exists():
        for line in path.read_bytes().split(b"\n")[:-1]:
            try:
                lines.append(verify_checksum(parse_json(line)))
            except ValueError:
                break
    return lines


def _done_index(path: Path) -> ShardIndex | None:
    """The index of shards that are done, to be checked and kept; None if there is none, or a damaged one."""
    try:
        return decode(ShardIndex, verify_checksum(parse_json(path.read_bytes())))
    except (ValueError, FileNotFoundError):
        return None


def _jobs(source: str, field: str | None, shard_bytes: int) -> Iterator[_Job]:
    """Cut a source into the texts of shards; where they are cut depends on the text alone."""
    number, held, size = 0, list[Document](), 0
    for document in _pieces(source, field, shard_bytes):
        held.append(document)
        size += len(document.content)
        if size >= shard_bytes:
            yield _Job(number, held)
            number, held, size = number + 1, [], 0
    if held:
        yield _Job(number, held)


def _pieces(source: str, field: str | None, piece_bytes: int) -> Iterator[Document]:
    """The documents of a source, one after another; long files in pieces."""
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
        hint = "It holds tokens already: give it to tidegate train as it is."
        raise InputError("data", expected="text", got=Path(source), hint=hint)


def _file_pieces(path: Path, name: str, piece_bytes: int) -> Iterator[Document]:
    """A file in pieces that end with a line, or with a character if a line is longer than a piece."""
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


def _read_pairs(path: str) -> str:
    """The byte pairs of a file, as JSON."""
    try:
        pairs = Path(path).read_text(encoding="utf-8")
        read_tokenizer(pairs, 0)
    except OSError as problem:
        raise InputError("tokenizer", expected="readable", got=path, hint=f"{problem.strerror}.") from None
    # The library has no class of its own for what it cannot parse.
    except Exception as problem:
        raise InputError("tokenizer", expected="the JSON of a tokenizer", got=path, hint=f"{problem}.") from None
    return pairs


def _learn_pairs(source: str, field: str | None, folder: Path, num_tokens: int, digest: str) -> str:
    """Learn byte pairs from the beginning of a text, and keep them in the folder; as JSON.

    digest : of those that are in the folder already, if they are the ones; damaged ones are learnt again
    """
    kept = folder / TOKENIZER
    if digest and kept.is_file() and sha256(kept.read_bytes()) == digest:
        return kept.read_text(encoding="utf-8")
    sample, size = list[Document](), 0
    for document in _pieces(source, field, SHARD_BYTES):
        sample.append(document)
        size += len(document.content)
        if size >= SAMPLE_BYTES:
            break
    pairs = portable_tokenizer(trained_tokenizer(sample, num_tokens).merges.to_str())
    write_content(kept, pairs.encode())
    return pairs


def _vocab_size(pairs: str) -> int:
    return len(_load(pairs).token_bytes)


@lru_cache(maxsize=2)
def _load(pairs: str) -> Tokenizer:
    return read_tokenizer(pairs, 0) if pairs else byte_tokenizer()


def _write_shard(job: _Job, folder: Path, pairs: str) -> Shard:
    """Encode the text of a shard and write its file."""
    encoder = _load(pairs)
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
