"""Records of comparisons and runs: one JSON object with a checksum per line. Pages are made only from them."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias

from tidegate._files import explain_os_errors
from tidegate._json import add_checksum, decode, encode, parse_json, verify_checksum
from tidegate._validation import InputError
from tidegate.gates import Gates
from tidegate.lab.tasks.task import TaskFacts
from tidegate.lab.training.measurements import LayerGauge, ModelCurvature
from tidegate.lab.training.run import Run

Match: TypeAlias = Literal["tokens", "params", "flops", "time", "runs"]
"""The budget that is equal between variants; `runs` stands for runs that the user defined."""
Search: TypeAlias = Literal["grid", "stepwise"]
"""How a grid is searched: every point, or every start at the middle rate, then the other rates at the best start."""
Status: TypeAlias = Literal["finished", "diverged", "failed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One variant of a comparison: a gate under a name, perhaps with its own options."""

    name: str
    gate: str
    """Its spelling."""
    overrides: dict[str, float | str] = field(default_factory=dict)
    """Its own options of the training and of the model."""

    @property
    def gates(self) -> Gates:
        """The parsed gates."""
        return Gates.parse(self.gate)


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """The settings that are tried for every variant: pairs of a learning rate and an initialization."""

    rates: tuple[float, ...]
    """Multiples of a variant's own learning rate."""
    starts: tuple[float | str, ...]
    """Values of the models' `init`."""
    search: Search = "grid"
    chooses: bool = True
    """Whether each seed takes its best trial; if not, the trials only show where verdicts hold."""

    @property
    def middle(self) -> float:
        """The rate in the middle, of an even number the higher one."""
        return sorted(self.rates)[len(self.rates) // 2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The request of a comparison: the first line of its records."""

    command: str
    """The command line that repeats it."""
    variants: tuple[Variant, ...]
    control: str
    """The variant that the others are compared with."""
    num_seeds: int
    match: Match
    margin: float
    """Differences below this share of the control's loss do not matter."""
    grid: Grid | None
    """The tuning grid of each seed; None without tuning."""
    settings: str = ""
    """The source of previously tuned settings, in words; empty without such settings."""
    task: TaskFacts = field(metadata={"decode": TaskFacts.from_dict})
    """Kind, source, fingerprint and sizes of the data."""
    description: str
    """The data in a sentence."""
    preset: str
    budget: int
    """Tokens, or images, that the control is trained on."""
    request: str
    """Hash of everything above that decides numbers."""
    environment: dict[str, str]
    """Versions and machine."""
    kind: Literal["plan"] = "plan"

    @property
    def is_tuned(self) -> bool:
        """Whether every variant was trained with its best trial's settings."""
        return self.grid is not None and self.grid.chooses


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A run at one of its evaluations."""

    step: int
    tokens: int
    """Tokens, or images, seen so far."""
    flops: float
    """Spent so far on training."""
    loss: float | None
    """On the validation set, nats; None if it is not finite."""
    train_loss: float | None
    """Mean over the batches since the last point."""
    gradient_norm: float | None
    """Mean since the last point, before clipping."""
    gate_gradient_norm: float | None = None
    """The same, only for the gates' parameters."""


LayerByHead: TypeAlias = tuple[tuple[float | None, ...], ...]
"""One number for each head of each layer; None where no query could be counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservationSummary:
    """The means over queries that `tidegate.torch.observe` measured of a model on the probe.

    A query that sees a single key, such as the first of a causal row, is left out.
    """

    tokens: int
    """Tokens, or images, seen so far."""
    entropy: LayerByHead
    """Of the attention weights, nats."""
    sink_mass: LayerByHead
    """Weight on the first position."""
    sink_impact: LayerByHead
    """Share of the first position in the sum of weighted value norms."""
    sink_contribution: LayerByHead | None = None
    """Norm of the first position's contribution to the layer's output; None if it was not observed."""
    sink_logit: LayerByHead | None = None
    """Weight on a sink of the softmax; None where no layer has one."""
    gates: dict[str, dict[str, LayerByHead]]
    """By site: `mean`; `below`, the share of values that are closed; `spread`, the deviation between tokens."""
    largest_activation: tuple[float, ...]
    """Of the residual stream after each block."""
    effective_rank: tuple[float, ...]
    """Of the residual stream after each block: the exponential of the entropy of its normalized singular values."""
    map_rank: LayerByHead | None = None
    """Effective rank of the map from value to output, see `map_ranks` in `observe`; None in older records, and where
    a gate on the way adds or replaces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """The fields that differ between repetitions of a run."""

    started: str
    """ISO 8601, UTC."""
    seconds: tuple[float, ...]
    """Spent on training, at each point of the curve; evaluations left out."""
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """A run and its results. Only `timing` differs between repetitions."""

    id: str
    """The content hash of the run."""
    run: Run = field(metadata={"decode": Run.from_dict})
    status: Status
    num_parameters: int = 0
    num_gate_parameters: int = 0
    flops: float = 0.0
    """Of the whole training."""
    tokens: int = 0
    """Tokens, or images, that it was trained on."""
    num_spikes: int | None = None
    """Steps with a loss spike, see `tidegate.lab.training.loop.is_spike`; None in older records."""
    loss: float | None = None
    """On all held-out examples at the end, nats; None unless finished."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The metrics of the task besides the loss: `bits_per_byte` or `accuracy`."""
    num_evaluated: int = 0
    """Targets of the held-out examples."""
    curve: tuple[Point, ...] = ()
    observations: tuple[ObservationSummary, ...] = ()
    """Gates and attention in the course of the training."""
    loss_by_position: tuple[tuple[float, float], ...] = ()
    """Position and loss there, up to four times the training length; empty where a task has no length."""
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Hashes of shared data of the variants of a seed: `batches`, `validation`, and initial `weights:<name>`.

    The names of a gate's weights include its spelling, so that different gates at one site share none.
    """
    error: str = ""
    """The traceback of a failure, or the step of a divergence."""
    environment: dict[str, str] = field(default_factory=dict)
    timing: Timing | None = None
    kind: Literal["run"] = "run"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """The costs of one variant, measured beside the others before the runs."""

    variant: str
    tokens_per_second: float
    """Of training steps, on the run's number of threads."""
    time_ratio: float
    """Seconds of a training step over the control's, the median of interleaved pairs."""
    time_ratio_low: float
    time_ratio_high: float
    """The interquartile range of the pairs."""
    peak_bytes: int | None
    """Peak memory of a training step above the idle process, measured in a separate process."""
    decode_milliseconds: float | None
    """One token after a full context; None for models that do not generate."""
    cache_bytes_per_token: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """The costs of all variants, from one interleaved measurement."""

    request: str
    items: tuple[Cost, ...]
    environment: dict[str, str]
    kind: Literal["costs"] = "costs"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerMeasurements:
    """The curvature of a trained model's layers, and the gauge of their heads."""

    id: str
    """Of the run that trained it."""
    curvature: ModelCurvature | None = None
    curvature_reason: str = ""
    """Why there is no curvature; empty if there is."""
    gauge: tuple[LayerGauge, ...] = ()
    gauge_reason: str = ""
    """Why there is no gauge; empty if there is."""
    kind: Literal["layers"] = "layers"


Line: TypeAlias = Plan | Record | Costs | LayerMeasurements


def last_costs(lines: Sequence[Line]) -> Costs | None:
    """Return the valid costs: the last, since missing ones are measured again."""
    return next((line for line in reversed(lines) if isinstance(line, Costs)), None)


def records_path(folder: Path) -> Path:
    """Return the path of the records in a folder."""
    return folder / "records.jsonl"


class RecordFile:
    """An append-only file of records. A line that a crash truncated is ignored."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._locked: BinaryIO | None = None

    def read(self) -> list[Line]:
        """Return every complete line, in order; none if there is no file."""
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().split(b"\n")[:-1]
        return [self._parse(number, line) for number, line in enumerate(lines, start=1)]

    def has_lines(self) -> bool:
        """Return whether anything was recorded; locking creates an empty file."""
        return self.path.exists() and self.path.stat().st_size > 0

    @contextmanager
    def lock(self) -> Generator[None]:
        """Lock the folder against other processes. Raise InputError if it is locked already."""
        with self.path.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                expected = "a folder that is not locked by another command"
                hint = "Wait for it, or choose another folder."
                raise InputError("out", expected=expected, got=self.path.parent, hint=hint) from None
            self._locked = file
            try:
                yield
            finally:
                self._locked = None

    def _parse(self, number: int, line: bytes) -> Line:
        try:
            return decode(Line, verify_checksum(parse_json(line)))
        except InputError as problem:
            raise InputError(
                f"{self.path}, line {number}: {problem.field}",
                expected=problem.expected,
                got=problem.got,
                hint=f"{problem.hint}{problem.hint and ' '}The line is damaged, or of another version. Remove it and "
                "rerun the command to recompute it; or choose another folder.",
            ) from None

    def append(self, line: Line) -> None:
        """Add a line, and wait until it is on the disk.

        Raises:
            FileNotFoundError: The file is locked, and was removed or replaced: a new one would lack all earlier lines.
        """
        if self._locked is not None and not self._is_in_place(self._locked):
            raise FileNotFoundError(
                f"{self.path} was removed or replaced while this command was running, so nothing more can be added to "
                "it. Rerun the command to repeat the missing runs."
            )
        text = json.dumps(add_checksum(encode(line)), allow_nan=False).encode() + b"\n"
        with explain_os_errors(self.path, len(text)), self.path.open("a+b") as file:
            # Drop a line that a crash truncated.
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def _is_in_place(self, locked: BinaryIO) -> bool:
        """Return whether the path still leads to the file that is locked."""
        try:
            return os.path.samestat(os.fstat(locked.fileno()), self.path.stat())
        except FileNotFoundError:
            return False
