"""The interface of a task: a frozen description that finds its data, and the loaded data.

Legend: B batch, T positions, C channels, S image size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from tidegate._json import decode_part, require_object
from tidegate._validation import InputError

if TYPE_CHECKING:
    from torch import Tensor

TaskKind: TypeAlias = Literal["lm", "image", "recall"]

NO_TARGET = -100
"""Marks a position without a target; the loss ignores it."""

BATCH_ROWS = 64
"""Examples per validation batch."""
PROBE_ROWS = 8
LONGER = 4
"""Ratio of the length of `TaskData.long` to the training length."""


class Batch(NamedTuple):
    """Examples with their targets."""

    inputs: Tensor
    """(B, T) tokens, int64, or (B, C, S, S) images, float32."""
    targets: Tensor
    """(B, T) next tokens, or (B,) classes, int64; `NO_TARGET` where there is none."""


class TaskData(Protocol):
    """The loaded examples of a task. Batches depend only on seed and step, so that a run can resume at any step."""

    @property
    def facts(self) -> dict[str, Any]:
        """Return the facts about the data that the page shows, as JSON: sizes, files, fingerprints.

        They include `kind`, `length`, `chance_loss` and `num_training_examples`.
        """
        ...

    @property
    def description(self) -> str:
        """Describe the data in one sentence."""
        ...

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens or classes."""
        ...

    @property
    def bytes_per_token(self) -> float | None:
        """Return the mean over the held-out targets; None if they are not text."""
        ...

    @property
    def chance_loss(self) -> float:
        """Return the loss of a uniform guess over the possible targets, in nats."""
        ...

    @property
    def num_training_examples(self) -> int | None:
        """Return the number of training tokens or images; None for data that are generated without end."""
        ...

    def batch(self, *, seed: int, step: int, size: int) -> Batch:
        """Return training examples, which depend only on the arguments."""
        ...

    def validation(self) -> Sequence[Batch]:
        """Return held-out examples, the same for every run and few enough to be evaluated during training."""
        ...

    def final(self) -> Sequence[Batch]:
        """Return the held-out examples of the final evaluation, the same for every run."""
        ...

    def probe(self) -> Batch:
        """Return a few held-out examples on which gates and attention are observed."""
        ...

    def long(self) -> Batch | None:
        """Return held-out rows of four times the training length; None for a task without a length."""
        ...


def in_batches(rows: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """Split rows into batches; none has a single row unless there is only one."""
    cuts = list(range(0, len(rows), BATCH_ROWS))
    if len(cuts) > 1 and len(rows) - cuts[-1] == 1:
        cuts.pop()
    return [rows[start:end] for start, end in zip(cuts, [*cuts[1:], len(rows)], strict=True)]


class Task(Protocol):
    """The description of a task: a frozen dataclass of JSON values, so that it can be part of a `Run`."""

    @property
    def kind(self) -> TaskKind:
        """Return the kind, which determines the model and the wording of the page."""
        ...

    @property
    def length(self) -> int:
        """Return the number of tokens in a training example; 1 for images."""
        ...

    def load(self) -> TaskData:
        """Load the data. Raise InputError if that fails, or if the data does not match the fingerprint."""
        ...

    def to_dict(self, *, location: bool = True) -> dict[str, Any]:
        """Return plain JSON values, including `kind`; without `location`, leave out the path of the data."""
        ...


@dataclass(frozen=True, slots=True)
class RecordedTask:
    """A user-defined task as a record describes it. Only its own class can load it."""

    values: dict[str, Any]

    @property
    def kind(self) -> TaskKind:
        """Return the kind of model that it needs."""
        return self.values["kind"]

    @property
    def length(self) -> int:
        """Return the number of tokens in a training example, if the description has it."""
        if "length" not in self.values:
            raise InputError("task.length", expected="in the description of the task")
        return self.values["length"]

    def load(self) -> TaskData:
        """Raise InputError: the description does not name the class."""
        hint = "Create the run with the class of the task."
        raise InputError("task", expected="a task of this library", got=self.values, hint=hint)

    def to_dict(self, *, location: bool = True) -> dict[str, Any]:  # noqa: ARG002
        """Return the description as it was read."""
        return self.values


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskFacts:
    """The data of a comparison, as its plan describes it."""

    kind: TaskKind
    chance_loss: float
    num_training_examples: int | None
    length: int | None = None
    held_out: str = ""
    """The held-out part, in words."""
    all: dict[str, Any]
    """All of `TaskData.facts`, including these fields."""

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> TaskFacts:
        """Return the facts. Raise InputError if one that every page needs is missing or has another type."""
        own = {option.name: facts[option.name] for option in fields(cls) if option.name in require_object(facts)}
        return decode_part(cls, {**own, "all": facts})

    def to_dict(self) -> dict[str, Any]:
        """Return all facts as JSON values."""
        return self.all


Purpose: TypeAlias = Literal["training", "validation", "probe", "long"]
"""The use of random numbers: streams of different purposes never overlap, for any seed. The order fixes all numbers."""


def make_rng(purpose: Purpose, *, seed: int, step: int) -> np.random.Generator:
    """Return a random generator that depends only on the arguments."""
    for name, value in (("seed", seed), ("step", step)):
        if value < 0:
            raise InputError(name, expected="at least 0", got=value)
    # NumPy may change its default bit generator.
    return np.random.Generator(np.random.PCG64([get_args(Purpose).index(purpose), seed, step]))
