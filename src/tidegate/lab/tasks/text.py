"""Language modeling: predict the next token of a text.

PyTorch is imported when a batch is created; describing a task does not need it.

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
from tidegate.lab.tasks.source import EMBEDDED, read_corpus, read_tokens, resolve_source, source_kind
from tidegate.lab.tasks.streams import Streams, TokenStream, shard_streams, text_streams, token_streams
from tidegate.lab.tasks.task import LONGER, PROBE_ROWS, Batch, in_batches, make_rng
from tidegate.lab.tasks.tokenizer import num_merged_tokens, portable_tokenizer

DEFAULT_LENGTH = 128
"""Default sequence length in tokens."""

_LOCATION = ("source", "field")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TextTask:
    """Language modeling on a text."""

    source: str = EMBEDDED
    """`stdlib`, a file, a folder, a pattern, JSON lines, a `.npy` file of tokens, a folder of shards, or `hf:NAME`."""
    field: str | None = None
    """The field that holds the text in JSON lines and datasets; None is "text"."""
    tokenizer: str = "bytes"
    """`bytes`, `bpe:N`, or `none` for data that is already tokenized."""
    length: int = DEFAULT_LENGTH
    """Sequence length in tokens."""
    validation_share: float = 0.05
    """Approximate share of the text that is held out, at least one window; the embedded corpus has a fixed list."""
    num_validation_tokens: int = 32_768
    """Maximum number of held-out tokens in each evaluation during training."""
    num_final_tokens: int = 4_194_304
    """Maximum number of held-out tokens in the final evaluation."""
    fingerprint: str = ""
    """The expected fingerprint of the text; empty accepts any."""
    kind: Literal["lm"] = "lm"

    def __post_init__(self) -> None:
        for name in ("length", "num_validation_tokens", "num_final_tokens"):
            require_size(name, getattr(self, name))
        if not 0 < self.validation_share <= 0.5:
            raise InputError("validation_share", expected="in (0, 0.5]", got=self.validation_share)
        if self.tokenizer != "none":
            num_merged_tokens(self.tokenizer)

    def load(self) -> TextData:
        """Read and tokenize the text, once per process. Raise InputError if it has changed."""
        data = _open(self)
        _require_whole(self)
        return data

    def open(self) -> TextData:
        """Return the same as `load`, but verify only the sizes of shards instead of their checksums."""
        return _open(self)

    def to_dict(self, *, location: bool = True) -> dict[str, Any]:
        """Return plain JSON values; without `location`, the fingerprint replaces the path."""
        dropped = () if location or not self.fingerprint else _LOCATION
        return {name: value for name, value in asdict(self).items() if name not in dropped}


def text_task(
    data: str | None = None, *, tokenizer: str | None = None, field: str | None = None, length: int = DEFAULT_LENGTH
) -> TextTask:
    """Return the task for `data` with its fingerprint. Raise InputError if the text cannot be found or read.

    Args:
        data: None or "stdlib" for the embedded corpus, a path, a pattern, or a name on the Hugging Face hub.
        tokenizer: None is `bytes` for text. For data that is already tokenized it must be None or its own tokenizer.
        field: The field that holds the text in JSON lines and datasets.
        length: Sequence length in tokens.
    """
    source = resolve_source(EMBEDDED if data is None else data)
    kind = source_kind(source)
    if kind in ("tokens", "shards"):
        if field is not None:
            raise InputError("field", expected="left out", got=field, hint=f"{data} is already tokenized.")
        found = read_tokens(source) if kind == "tokens" else read_index(Path(source))
        own = found.tokenizer.split()[0] if isinstance(found, ShardIndex) else ""
        if tokenizer not in (None, "none", own):
            by = f" by {own}" if own else ""
            hint = f"{data} is already tokenized{by}. Or tokenize the text again into another folder."
            expected = f"{own!r} or left out" if own else "left out"
            raise InputError("tokenizer", expected=expected, got=tokenizer, hint=hint)
        return TextTask(source=source, tokenizer="none", length=length, fingerprint=found.fingerprint)
    tokenizer = "bytes" if tokenizer is None else tokenizer
    num_merged_tokens(tokenizer)
    task = TextTask(source=source, field=field, tokenizer=tokenizer, length=length)
    return replace(task, fingerprint=read_corpus(source, field).fingerprint)


@final
class TextData:
    """Training and held-out tokens. No window crosses from one to the other."""

    def __init__(self, task: TextTask, streams: Streams) -> None:
        self._task, self._streams, self._length = task, streams, task.length
        self.vocab_size = streams.vocab_size
        self.chance_loss = math.log(streams.vocab_size)
        self.num_training_examples = len(streams.training)
        training, held_out = len(streams.training), len(streams.held_out)
        if min(training, held_out) <= task.length:
            expected = (
                f"at least {task.length + 1:,} training tokens and as many held-out ones, for length={task.length}"
            )
            hint = f"It has {training:,} and {held_out:,}. Use more text or a smaller length."
            raise InputError("data", expected=expected, got=Path(task.source), hint=hint)

    @property
    def tokenizer(self) -> str:
        """Return the BPE tokenizer as JSON; empty for bytes and for files of tokens."""
        return self._streams.tokenizer and portable_tokenizer(self._streams.tokenizer)

    @property
    def bytes_per_token(self) -> float | None:
        """Return the mean over the targets of the final evaluation; None for tokens whose text is unknown."""
        lengths = self._streams.token_bytes
        if lengths is None:
            return None
        targets = np.concatenate([batch.targets.flatten().numpy() for batch in self.final()])
        return float(lengths[targets].mean())

    @property
    def facts(self) -> dict[str, Any]:
        """Return source, fingerprint, sizes in tokens, and the held-out part."""
        streams = self._streams
        return {
            **self._task.to_dict(),
            "vocab_size": self.vocab_size,
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
        """Describe the text, its tokens and the held-out part."""
        streams = self._streams
        tokens = {"bytes": "one token per byte", "none": "already tokenized"}
        is_file_name = "." in streams.title.split()[0]
        title = streams.title if is_file_name else streams.title[:1].upper() + streams.title[1:]
        how = tokens.get(self._task.tokenizer, f"with a BPE vocabulary of {streams.vocab_size:,} tokens")
        return (
            f"{title}, {how}: {len(streams.training):,} training tokens "
            f"and {len(streams.held_out):,} held out ({streams.rule})."
        )

    def batch(self, *, seed: int, step: int, size: int) -> Batch:
        """Return windows (B, T) at random positions."""
        training = self._streams.training
        starts = make_rng("training", seed=seed, step=step).integers(0, len(training) - self._length, size=size)
        return _windows(training, starts, self._length)

    def validation(self) -> list[Batch]:
        """Return held-out windows (64, T) that do not overlap, evenly spread; the last batch may differ in size."""
        return self._batches(self._task.num_validation_tokens)

    def final(self) -> list[Batch]:
        """Return such windows up to the maximum of the final evaluation."""
        return self._batches(self._task.num_final_tokens)

    def probe(self) -> Batch:
        """Return eight of the validation windows, or all if there are fewer."""
        starts = self._window_starts(self._length)
        rows = np.arange(min(PROBE_ROWS, len(starts))) * len(starts) // PROBE_ROWS
        return _windows(self._streams.held_out, starts[rows], self._length)

    def long(self) -> Batch | None:
        """Return held-out windows of four times the length; None if there are fewer than two."""
        length = LONGER * self._length
        starts = self._window_starts(length)
        return _windows(self._streams.held_out, starts, length) if len(starts) > 1 else None

    def _batches(self, budget: int) -> list[Batch]:
        starts = self._window_starts(self._length, budget)
        return [_windows(self._streams.held_out, part, self._length) for part in in_batches(starts)]

    def _window_starts(self, length: int, budget: int | None = None) -> npt.NDArray[np.int64]:
        """Return evenly spread starts of held-out windows with at most `budget` tokens; None is that of validation."""
        budget = self._task.num_validation_tokens if budget is None else budget
        available = (len(self._streams.held_out) - 1) // length
        count = min(available, max(budget // length, 1))
        return np.arange(count) * available // max(count, 1) * length


def _windows(stream: TokenStream, starts: npt.NDArray[np.int64], length: int) -> Batch:
    """Return inputs and targets (B, T) of windows."""
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
