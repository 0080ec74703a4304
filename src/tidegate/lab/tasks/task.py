"""What a task is: a frozen description that finds its data, and the data once it is loaded.

Legend: B batch, T positions, C channels, S image size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from tidegate._json import decode_part, require_object
from tidegate._validation import InputError

if TYPE_CHECKING:
    from torch import Tensor

TaskKind: TypeAlias = Literal["lm", "image", "recall"]

NO_TARGET = -100
"""A target that is not one: the loss leaves it out."""

BATCH_ROWS = 64
"""Examples of a validation batch."""
PROBE_ROWS = 8
LONGER = 4
"""How many times the training length the long rows have."""


class Batch(NamedTuple):
    """Examples, and what a model should say of them."""

    inputs: Tensor
    """(B, T) tokens, int64, or (B, C, S, S) images, float32."""
    targets: Tensor
    """(B, T) next tokens, or (B,) classes, int64; `NO_TARGET` where there is none."""


class TaskData(Protocol):
    """A task's examples, loaded. Batches depend on seed and step alone, so that a run can go on at any step."""

    @property
    def facts(self) -> dict[str, Any]:
        """What the page says of the data, as JSON: sizes, files, fingerprints.

        `kind`, `length`, `chance_loss` and `num_training_examples` are among them.
        """
        ...

    @property
    def description(self) -> str:
        """The data in a sentence."""
        ...

    @property
    def vocab_size(self) -> int:
        """Tokens, or classes."""
        ...

    @property
    def bytes_per_token(self) -> float | None:
        """Mean over the validation text; None where the targets are no text."""
        ...

    @property
    def chance_loss(self) -> float:
        """The loss of the best guess that knows nothing of the input, nats: all possible targets alike."""
        ...

    @property
    def num_training_examples(self) -> int | None:
        """Tokens, or images, that there are to train on; None for data that are made on the fly and never end."""
        ...

    def batch(self, *, seed: int, step: int, size: int) -> Batch:
        """Training examples: a function of its arguments alone."""
        ...

    def validation(self) -> Sequence[Batch]:
        """The same held-out examples for every run, few enough to be looked at in the course of the training."""
        ...

    def final(self) -> Sequence[Batch]:
        """The held-out examples that a run's last loss is taken on: all that there are, the same for every run."""
        ...

    def probe(self) -> Batch:
        """A few held-out examples on which gates and attention are looked at."""
        ...

    def long(self) -> Batch | None:
        """Held-out rows of four times the training length, if the task has a length to go beyond."""
        ...


def in_batches(rows: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """Cut rows into batches, none of a single row unless it is the only one."""
    cuts = list(range(0, len(rows), BATCH_ROWS))
    if len(cuts) > 1 and len(rows) - cuts[-1] == 1:
        cuts.pop()
    return [rows[start:end] for start, end in zip(cuts, [*cuts[1:], len(rows)], strict=True)]


class Task(Protocol):
    """Describes a task: a frozen dataclass of JSON values, so that it can be part of a `Run`."""

    @property
    def kind(self) -> TaskKind:
        """Which model it wants, and which words the page uses."""
        ...

    @property
    def length(self) -> int:
        """Tokens of a training example; 1 for images."""
        ...

    def load(self) -> TaskData:
        """Read or make the data. Raise InputError if that cannot be, or if it is not what the fingerprint says."""
        ...

    def to_dict(self, *, location: bool = True) -> dict[str, Any]:
        """As plain JSON values, `kind` among them; without `location`, less what only says where the data lies."""
        ...


@dataclass(frozen=True, slots=True)
class RecordedTask:
    """A task of somebody's own, as a record describes it: only its own class can load it."""

    values: dict[str, Any]

    @property
    def kind(self) -> TaskKind:
        """The kind of model that it needs."""
        return self.values["kind"]

    @property
    def length(self) -> int:
        """Tokens of a training example, if the description has them."""
        if "length" not in self.values:
            raise InputError("task.length", expected="given in the description of the task")
        return self.values["length"]

    def load(self) -> TaskData:
        """Raise an InputError: the description does not say where the class is."""
        hint = "Make the run with the class of the task."
        raise InputError("task", expected="a task of this library", got=self.values, hint=hint)

    def to_dict(self, *, location: bool = True) -> dict[str, Any]:  # noqa: ARG002
        """Return the description as it was read."""
        return self.values


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskFacts:
    """The data of a comparison, as its plan describes them."""

    kind: TaskKind
    chance_loss: float
    num_training_examples: int | None
    length: int | None = None
    held_out: str = ""
    """What is held out, in words."""
    all: dict[str, Any]
    """Everything that `TaskData.facts` says, these fields among it."""

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> TaskFacts:
        """Return the facts. Raise an InputError if one that every page needs is missing or of another type."""
        own = {option.name: facts[option.name] for option in fields(cls) if option.name in require_object(facts)}
        return decode_part(cls, {**own, "all": facts})

    def to_dict(self) -> dict[str, Any]:
        """Return all facts as JSON values."""
        return self.all


Purpose: TypeAlias = Literal["training", "validation", "probe", "long"]
"""What numbers are for: those of one purpose never come up again for another, whatever the seed."""

_WORDS: dict[Purpose, int] = {"training": 0, "validation": 1, "probe": 2, "long": 3}


def make_rng(purpose: Purpose, *, seed: int, step: int) -> np.random.Generator:
    """Return a generator that depends on its arguments alone."""
    for name, value in (("seed", seed), ("step", step)):
        if value < 0:
            raise InputError(name, expected="at least 0", got=value)
    # The bit generator is named, since NumPy may change its default one.
    return np.random.Generator(np.random.PCG64([_WORDS[purpose], seed, step]))
