"""Associative recall: pairs of a key and a value, then keys whose values must be said. Made on the fly.

Legend: B batch, P pairs, Q queries, T = 2 P + Q positions.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, final

import numpy as np
import numpy.typing as npt

from tidegate._validation import InputError, require_size
from tidegate.lab.tasks.task import BATCH_ROWS, LONGER, NO_TARGET, PROBE_ROWS, Batch, Purpose, make_rng

_VALIDATION_ROWS = 512
_LONG_ROWS = 128


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RecallTask:
    """Say the value that stood beside a key. Keys of an example differ; values may come more than once."""

    num_pairs: int = 16
    """Pairs of an example."""
    num_queries: int | None = None
    """Keys that are asked for, each at most once; None asks for all of them."""
    num_keys: int = 64
    """Keys to draw from, at least as many as pairs. The tokens from 0 on."""
    num_values: int = 64
    """Values to draw from. The tokens after the keys."""
    kind: Literal["recall"] = "recall"

    def __post_init__(self) -> None:
        for name in ("num_pairs", "num_queries", "num_keys", "num_values"):
            require_size(name, getattr(self, name), optional=name == "num_queries")
        if self.num_keys < self.num_pairs:
            raise InputError("num_keys", expected=f"at least num_pairs={self.num_pairs}", got=self.num_keys)
        if self.queries > self.num_pairs:
            raise InputError("num_queries", expected=f"at most num_pairs={self.num_pairs}", got=self.num_queries)

    @property
    def queries(self) -> int:
        """Keys that are asked for."""
        return self.num_pairs if self.num_queries is None else self.num_queries

    @property
    def length(self) -> int:
        """Two tokens a pair and one a query."""
        return 2 * self.num_pairs + self.queries

    def load(self) -> RecallData:
        """Nothing to read."""
        return RecallData(self)

    def to_dict(self, *, location: bool = True) -> dict[str, Any]:  # noqa: ARG002
        """As plain JSON values; there is no location to leave out."""
        return asdict(self)


@final
class RecallData:
    """Examples drawn anew for every step. Those held out come from make_rng that no training seed reaches."""

    def __init__(self, task: RecallTask) -> None:
        self._task = task

    @property
    def vocab_size(self) -> int:
        """Keys and values."""
        return self._task.num_keys + self._task.num_values

    @property
    def bytes_per_token(self) -> None:
        """The targets are no text."""
        return

    @property
    def chance_loss(self) -> float:
        """All values alike; keys are never a target."""
        return math.log(self._task.num_values)

    @property
    def num_training_examples(self) -> None:
        """There are always more."""
        return

    @property
    def facts(self) -> dict[str, Any]:
        """Sizes."""
        return {
            **self._task.to_dict(),
            "length": self._task.length,
            "vocab_size": self.vocab_size,
            "chance_loss": self.chance_loss,
            "num_training_examples": self.num_training_examples,
        }

    @property
    def description(self) -> str:
        """Pairs, queries, and what there is to draw from."""
        task = self._task
        return (
            f"Associative recall, made on the fly: {task.num_pairs} pairs of {task.num_keys} keys and "
            f"{task.num_values} values, then {task.queries} keys whose values must be said."
        )

    def batch(self, *, seed: int, step: int, size: int) -> Batch:
        """Examples (B, T)."""
        return self._examples("training", seed=seed, step=step, size=size)

    def validation(self) -> list[Batch]:
        """512 examples in batches of 64."""
        steps = range(_VALIDATION_ROWS // BATCH_ROWS)
        return [self._examples("validation", seed=0, step=step, size=BATCH_ROWS) for step in steps]

    def final(self) -> list[Batch]:
        """The same: what is made on the fly has no end."""
        return self.validation()

    def probe(self) -> Batch:
        """Eight examples."""
        return self._examples("probe", seed=0, step=0, size=PROBE_ROWS)

    def long(self) -> Batch | None:
        """Examples of four times as many pairs and queries; None if there are too few keys for that."""
        if LONGER * self._task.num_pairs > self._task.num_keys:
            return None
        return self._examples("long", seed=0, step=0, size=_LONG_ROWS, times=LONGER)

    def _examples(self, purpose: Purpose, *, seed: int, step: int, size: int, times: int = 1) -> Batch:
        import torch

        task, numbers = self._task, make_rng(purpose, seed=seed, step=step)
        P, Q = times * task.num_pairs, times * task.queries
        keys_BP = _permutations(numbers, size, task.num_keys)[:, :P]
        values_BP = task.num_keys + numbers.integers(0, task.num_values, size=(size, P))
        asked_BQ = _permutations(numbers, size, P)[:, :Q]
        pairs_BT = np.stack((keys_BP, values_BP), axis=-1).reshape(size, 2 * P)
        inputs = np.concatenate((pairs_BT, np.take_along_axis(keys_BP, asked_BQ, axis=1)), axis=1)
        targets = np.full_like(inputs, NO_TARGET)
        targets[:, 2 * P :] = np.take_along_axis(values_BP, asked_BQ, axis=1)
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets))


def _permutations(numbers: np.random.Generator, rows: int, count: int) -> npt.NDArray[np.int64]:
    """(rows, count): in each row the numbers below `count`, in an order of its own."""
    return numbers.permuted(np.tile(np.arange(count), (rows, 1)), axis=1)
