"""Language modelling: the next token of a text.

PyTorch is imported where a batch is made: a task can be described without it.

Legend: B batch, T positions.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
import numpy.typing as npt

from tidegate._validation import InputError, require_size
from tidegate.lab.tasks.documents import changed
from tidegate.lab.tasks.shards import ShardIndex, read_index, require_whole_shards
from tidegate.lab.tasks.source import EMBEDDED, TokenFile, read_corpus, read_tokens, resolve_source, source_kind
from tidegate.lab.tasks.streams import Streams, TokenStream, shard_streams, text_streams, token_streams
from tidegate.lab.tasks.task import LONGER, PROBE_ROWS, Batch, in_batches, make_rng
from tidegate.lab.tasks.tokenizer import num_merged_tokens, portable_tokenizer

DEFAULT_LENGTH = 128
"""Tokens of a training window."""

_LOCATION = ("source", "field")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TextTask:
    """The next token of a text, from all before it."""

    source: str = EMBEDDED
    """`stdlib`, a file, a folder, a pattern, JSON lines, a `.npy` file of tokens, a folder of shards, or `hf:NAME`."""
    field: str | None = None
    """Where JSON lines and datasets have their text; None is "text"."""
    tokenizer: str = "bytes"
    """`bytes`, `bpe:N`, or `none` for what is tokens already."""
    length: int = DEFAULT_LENGTH
    """Tokens of a training window."""
    validation_share: float = 0.05
    """Approximate share of the text that is held out, at least one window; the embedded corpus has a fixed list."""
    num_validation_tokens: int = 32_768
    """How much of what is held out is evaluated in the course of the training, at most."""
    num_final_tokens: int = 4_194_304
    """How much of it is evaluated at the end, at most: all, unless that would take longer than to train."""
    fingerprint: str = ""
    """What the text must be; empty takes what is there."""
    kind: Literal["lm"] = "lm"

    def __post_init__(self) -> None:
        for name in ("length", "num_validation_tokens", "num_final_tokens"):
            require_size(name, getattr(self, name))
        if not 0 < self.validation_share <= 0.5:
            raise InputError("validation_share", expected="above 0 and at most 0.5", got=self.validation_share)
        if self.tokenizer != "none":
            num_merged_tokens(self.tokenizer)

    def load(self) -> TextData:
        """Read the text and make tokens of it; once in a process. Raise InputError if it is no longer what it was."""
        data = _open(self)
        _require_whole(self)
        return data

    def open(self) -> TextData:
        """The same, but shards are held against the sizes in their index alone, and not read through."""
        return _open(self)

    def to_dict(self, *, location: bool = True) -> dict[str, Any]:
        """As plain JSON values; without `location`, the fingerprint stands for where the text lies."""
        dropped = () if location or not self.fingerprint else _LOCATION
        return {name: value for name, value in asdict(self).items() if name not in dropped}


def text_task(
    data: str | None = None,
    *,
    tokenizer: str | None = None,
    field: str | None = None,
    length: int = DEFAULT_LENGTH,
) -> TextTask:
    """Return the task that `data` names, found and fingerprinted; raise InputError if there is no such text.

    data      : None or "stdlib" for the embedded corpus, a path, a pattern, or a name on the Hugging Face hub
    tokenizer : None reads bytes, and takes tokens as they are. What holds tokens already admits its own alone
    """
    source = resolve_source(EMBEDDED if data is None else data)
    kind = source_kind(source)
    if kind in ("tokens", "shards"):
        if field is not None:
            raise InputError("field", expected="left out", got=field, hint=f"{data} holds tokens already.")
        found = read_tokens(source) if kind == "tokens" else read_index(Path(source))
        _require_own_tokenizer(tokenizer, found, data)
        return TextTask(source=source, tokenizer="none", length=length, fingerprint=found.fingerprint)
    tokenizer = "bytes" if tokenizer is None else tokenizer
    num_merged_tokens(tokenizer)
    task = TextTask(source=source, field=field, tokenizer=tokenizer, length=length)
    return replace(task, fingerprint=read_corpus(source, field).fingerprint)


def _require_own_tokenizer(tokenizer: str | None, found: TokenFile | ShardIndex, data: str | None) -> None:
    """Raise InputError for a tokenizer beside tokens that were made by another one."""
    own = found.tokenizer.split()[0] if isinstance(found, ShardIndex) else ""
    if tokenizer in (None, "none", own):
        return
    made_by = f", made by {own}" if own else ""
    hint = f"{data} holds tokens already{made_by}. Or tokenize the text again into another folder."
    raise InputError("tokenizer", expected=f"{own!r} or left out" if own else "left out", got=tokenizer, hint=hint)


@final
class TextData:
    """Two streams of tokens: one for training, one held out. No window reaches from one into the other."""

    def __init__(self, task: TextTask, streams: Streams) -> None:
        self._length = task.length
        self._streams = streams
        self._task = task
        training, held_out = len(streams.training), len(streams.held_out)
        if min(training, held_out) <= task.length:
            expected = f"at least {task.length + 1:,} tokens to train on and as many held out, for length={task.length}"
            hint = f"It has {training:,} and {held_out:,}. Give more text or a smaller length."
            raise InputError("data", expected=expected, got=Path(task.source), hint=hint)

    @property
    def vocab_size(self) -> int:
        """Tokens."""
        return self._streams.vocab_size

    @property
    def tokenizer(self) -> str:
        """The byte pairs as JSON that text was read by; empty for bytes, and for tokens as they came."""
        return self._streams.tokenizer and portable_tokenizer(self._streams.tokenizer)

    @property
    def bytes_per_token(self) -> float | None:
        """Mean over the targets of the last evaluation; None for tokens of which the text is not known."""
        lengths = self._streams.token_bytes
        if lengths is None:
            return None
        targets = np.concatenate([batch.targets.flatten().numpy() for batch in self.final()])
        return float(lengths[targets].mean())

    @property
    def chance_loss(self) -> float:
        """All tokens alike."""
        return math.log(self.vocab_size)

    @property
    def num_training_examples(self) -> int:
        """Tokens of the training stream."""
        return len(self._streams.training)

    @property
    def facts(self) -> dict[str, Any]:
        """Source, fingerprint, sizes in tokens, and what is held out."""
        streams = self._streams
        return {
            **self._task.to_dict(),
            "vocab_size": streams.vocab_size,
            "chance_loss": self.chance_loss,
            "num_documents": streams.num_documents,
            "num_training_examples": self.num_training_examples,
            "num_training_tokens": len(streams.training),
            "num_held_out_tokens": len(streams.held_out),
            "num_validation_tokens": sum(batch.targets.numel() for batch in self.validation()),
            "num_final_tokens": sum(batch.targets.numel() for batch in self.final()),
            "bytes_per_token": self.bytes_per_token,
            "held_out": streams.rule,
            "missing": list(streams.missing),
        }

    @property
    def description(self) -> str:
        """What is read, as what, and what is held out."""
        streams = self._streams
        read_as = {"bytes": "read byte by byte", "none": "tokens as they came"}
        is_file_name = "." in streams.title.split()[0]
        title = streams.title if is_file_name else streams.title[:1].upper() + streams.title[1:]
        how = read_as.get(self._task.tokenizer, f"as {streams.vocab_size:,} byte pairs")
        return (
            f"{title}, {how}: {len(streams.training):,} tokens to train on "
            f"and {len(streams.held_out):,} held out ({streams.rule})."
        )

    def batch(self, *, seed: int, step: int, size: int) -> Batch:
        """Windows at random starts, (B, T) each."""
        training = self._streams.training
        starts = make_rng("training", seed=seed, step=step).integers(0, len(training) - self._length, size=size)
        return _windows(training, starts, self._length)

    def validation(self) -> list[Batch]:
        """Windows of the held-out stream that do not overlap, evenly spread over it, (64, T) each but the last."""
        return self._batches(self._task.num_validation_tokens)

    def final(self) -> list[Batch]:
        """All such windows of the held-out stream, unless they are very many."""
        return self._batches(self._task.num_final_tokens)

    def probe(self) -> Batch:
        """Eight of the validation windows, or all if there are fewer."""
        starts = self._window_starts(self._length)
        rows = np.arange(min(PROBE_ROWS, len(starts))) * len(starts) // PROBE_ROWS
        return _windows(self._streams.held_out, starts[rows], self._length)

    def long(self) -> Batch | None:
        """Windows of four times the length, as much text as the validation has; None if not even two are held out."""
        length = LONGER * self._length
        starts = self._window_starts(length)
        return _windows(self._streams.held_out, starts, length) if len(starts) > 1 else None

    def _batches(self, budget: int) -> list[Batch]:
        starts = self._window_starts(self._length, budget)
        return [_windows(self._streams.held_out, part, self._length) for part in in_batches(starts)]

    def _window_starts(self, length: int, budget: int | None = None) -> npt.NDArray[np.int64]:
        """Starts of windows within a number of tokens, the validation's if None, evenly spread over the stream."""
        budget = self._task.num_validation_tokens if budget is None else budget
        available = (len(self._streams.held_out) - 1) // length
        count = min(available, max(budget // length, 1))
        return np.arange(count) * available // max(count, 1) * length


def _windows(stream: TokenStream, starts: npt.NDArray[np.int64], length: int) -> Batch:
    """Inputs and targets (B, T) of the windows that start there."""
    import torch

    tokens = torch.from_numpy(stream[starts[:, None] + np.arange(length + 1)].astype(np.int64))
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


@lru_cache(maxsize=4)
def _require_whole(task: TextTask) -> None:
    if source_kind(task.source) == "shards":
        require_whole_shards(Path(task.source), read_index(Path(task.source)))


@lru_cache(maxsize=4)
def _open(task: TextTask) -> TextData:
    share, window = task.validation_share, task.length + 1
    if source_kind(task.source) == "shards":
        index = read_index(Path(task.source))
        _require_fingerprint(task, index.fingerprint)
        return TextData(task, shard_streams(Path(task.source), index))
    if task.tokenizer == "none":
        file = read_tokens(task.source)
        _require_fingerprint(task, file.fingerprint)
        return TextData(task, token_streams(file, share=share, window=window))
    corpus = read_corpus(task.source, task.field)
    _require_fingerprint(task, corpus.fingerprint)
    return TextData(task, text_streams(corpus, tokenizer=task.tokenizer, share=share, window=window))


def _require_fingerprint(task: TextTask, found: str) -> None:
    if task.fingerprint not in ("", found):
        raise changed(task.source, task.fingerprint, found)
