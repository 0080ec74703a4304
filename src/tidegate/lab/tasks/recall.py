"""Associative recall: key-value pairs, then keys whose values are the targets. Examples are generated.

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
    """Recall the value of a key. The keys of an example differ; values may repeat."""

    num_pairs: int = 16
    """Number of pairs per example."""
    num_queries: int | None = None
    """Number of keys that are queried, each at most once; None queries all of them."""
    num_keys: int = 64
    """Number of different keys, at least `num_pairs`. They are the tokens from 0."""
    num_values: int = 64
    """Number of different values. They are the tokens after the keys."""
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
        """Return the number of keys that are queried."""
        return self.num_pairs if self.num_queries is None else self.num_queries

    @property
    def length(self) -> int:
        """Return the number of tokens: two per pair and one per query."""
        return 2 * self.num_pairs + self.queries

    def load(self) -> RecallData:
        """Return the data; nothing is read."""
        return RecallData(self)

    def to_dict(self, *, location: bool = True) -> dict[str, Any]:  # noqa: ARG002
        """Return plain JSON values; there is no path to leave out."""
        return asdict(self)


@final
class RecallData:
    """Random examples, new at every step. Held-out examples come from streams that no training seed reaches."""

    bytes_per_token: None = None
    num_training_examples: None = None

    def __init__(self, task: RecallTask) -> None:
        self._task = task
        self.vocab_size = task.num_keys + task.num_values
        # Keys are never targets.
        self.chance_loss = math.log(task.num_values)
        self.facts: dict[str, Any] = {
            **task.to_dict(),
            "length": task.length,
            "vocab_size": self.vocab_size,
            "chance_loss": self.chance_loss,
            "num_training_examples": self.num_training_examples,
        }
        self.description = (
            f"Associative recall, generated during training: {task.num_pairs} pairs of {task.num_keys} keys and "
            f"{task.num_values} values, then {task.queries} queried keys."
        )

    def batch(self, *, seed: int, step: int, size: int) -> Batch:
        """Return examples (B, T)."""
        return self._examples("training", seed=seed, step=step, size=size)

    def validation(self) -> list[Batch]:
        """Return 512 examples in batches of 64."""
        steps = range(_VALIDATION_ROWS // BATCH_ROWS)
        return [self._examples("validation", seed=0, step=step, size=BATCH_ROWS) for step in steps]

    def final(self) -> list[Batch]:
        """Return the same examples as `validation`."""
        return self.validation()

    def probe(self) -> Batch:
        """Return eight examples."""
        return self._examples("probe", seed=0, step=0, size=PROBE_ROWS)

    def long(self) -> Batch | None:
        """Return examples with four times as many pairs and queries; None if there are too few keys."""
        if LONGER * self._task.num_pairs > self._task.num_keys:
            return None
        return self._examples("long", seed=0, step=0, size=_LONG_ROWS, times=LONGER)

    def _examples(self, purpose: Purpose, *, seed: int, step: int, size: int, times: int = 1) -> Batch:
        import torch

        task, rng = self._task, make_rng(purpose, seed=seed, step=step)
        P, Q = times * task.num_pairs, times * task.queries
        keys_BP = _permutations(rng, size, task.num_keys)[:, :P]
        values_BP = task.num_keys + rng.integers(0, task.num_values, size=(size, P))
        queried_BQ = _permutations(rng, size, P)[:, :Q]
        pairs_BT = np.stack((keys_BP, values_BP), axis=-1).reshape(size, 2 * P)
        inputs = np.concatenate((pairs_BT, np.take_along_axis(keys_BP, queried_BQ, axis=1)), axis=1)
        targets = np.full_like(inputs, NO_TARGET)
        targets[:, 2 * P :] = np.take_along_axis(values_BP, queried_BQ, axis=1)
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets))


def _permutations(rng: np.random.Generator, rows: int, count: int) -> npt.NDArray[np.int64]:
    """Return (rows, count): in each row a random permutation of the numbers below `count`."""
    return rng.permuted(np.tile(np.arange(count), (rows, 1)), axis=1)
