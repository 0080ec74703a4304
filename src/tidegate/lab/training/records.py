"""What a comparison leaves behind: one JSON object a line, with a digest of it. The page is made from these alone."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
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
"""What is made equal; `runs` were given, and equal in what their maker chose."""
Search: TypeAlias = Literal["grid", "stepwise"]
"""How a grid is tried: every point of it, or every start at the middle rate, then the other rates at the best start."""
Status: TypeAlias = Literal["finished", "diverged", "failed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One of the things compared: a gate under a name, perhaps with options of its own."""

    name: str
    gate: str
    """As it is spelled."""
    overrides: dict[str, float | str] = field(default_factory=dict)
    """Options of its own, of the training and of the model."""

    @property
    def gates(self) -> Gates:
        """The gates that are spelled."""
        return Gates.parse(self.gate)


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """What is tried for every variant alike: pairs of a learning rate and a start."""

    rates: tuple[float, ...]
    """Multiples of a variant's own learning rate."""
    starts: tuple[float | str, ...]
    """Values of the models' `init`."""
    search: Search = "grid"
    chooses: bool = True
    """Whether each block takes the best that it tried; if not, the trials only map where verdicts hold."""

    @property
    def middle(self) -> float:
        """The rate in the middle, of an even number the higher one."""
        return sorted(self.rates)[len(self.rates) // 2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What was asked for: the first line of a file of records."""

    command: str
    """What to type to get this again."""
    variants: tuple[Variant, ...]
    control: str
    """The variant that the others are compared with."""
    num_seeds: int
    match: Match
    margin: float
    """Differences below this share of the control's loss do not matter."""
    grid: Grid | None
    """What was tuned over, inside each block; None if nothing was."""
    settings: str = ""
    """Where settings that were tuned before come from, in words; empty if there were none."""
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
        """Whether every variant got the best that it tried."""
        return self.grid is not None and self.grid.chooses


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Where a run stood at one of its evaluations."""

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
    """The same, of the gates' parameters alone."""


LayerByHead: TypeAlias = tuple[tuple[float | None, ...], ...]
"""One number for each head of each layer; None where no query could be counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservationSummary:
    """What `tidegate.torch.observe` saw of a model on the probe at one moment: means over queries.

    By its rule for means a query that may see a single key, such as the first of a causal row, is left out.
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
    """Size of what the first position adds to the layer's output; None where that was not seen."""
    sink_logit: LayerByHead | None = None
    """Weight on a sink of the softmax; None where no layer has one."""
    gates: dict[str, dict[str, LayerByHead]]
    """By site: `mean`; `below`, the share of values that are closed; `spread`, the deviation between tokens."""
    largest_activation: tuple[float, ...]
    """Of the residual stream after each block."""
    effective_rank: tuple[float, ...]
    """Of the residual stream after each block: the exponential of the entropy of its normalised singular values."""
    map_rank: LayerByHead | None = None
    """Effective rank of the map from value to output, see `tidegate.lab.training.map_rank`; None in older records, and
    where a gate on the way adds or replaces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """What depends on the moment and not on the run."""

    started: str
    """ISO 8601, UTC."""
    seconds: tuple[float, ...]
    """Spent on training, at each point of the curve; evaluations left out."""
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One run and what came of it. All but `timing` is the same whenever and however it is run."""

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
    """Steps whose loss leapt up, see `tidegate.lab.training.loop.is_spike`; None in older records."""
    loss: float | None = None
    """On all held-out examples at the end, nats; None unless finished."""
    metrics: dict[str, float] = field(default_factory=dict)
    """`bits_per_byte`, `accuracy`: what the task reports besides the loss."""
    num_evaluated: int = 0
    """Targets of the held-out examples."""
    curve: tuple[Point, ...] = ()
    observations: tuple[ObservationSummary, ...] = ()
    """What gates and attention did, in the course of the training."""
    loss_by_position: tuple[tuple[float, float], ...] = ()
    """Position and loss there, up to four times the training length; empty where a task has no length."""
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Of what the variants of a block share: `batches`, `validation` for what is held out, `weights:<name>` of each at
    the start.

    A gate's weights have its spelling in their name: another gate at the same site has none in common with it.
    """
    error: str = ""
    """Where it failed, or the step at which it diverged."""
    environment: dict[str, str] = field(default_factory=dict)
    timing: Timing | None = None
    kind: Literal["run"] = "run"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What one variant costs, measured beside the others before the runs."""

    variant: str
    tokens_per_second: float
    """Of training steps, on the run's number of threads."""
    time_ratio: float
    """Seconds of a training step over the control's, the median of interleaved pairs."""
    time_ratio_low: float
    time_ratio_high: float
    """The middle half of the pairs."""
    peak_bytes: int | None
    """Most memory of a training step above rest, in a process of its own."""
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
    """The layers of one trained model: how they bend, and the gauge of their heads."""

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
    """Return the costs that hold: the last, since figures that were missing are measured again."""
    return next((line for line in reversed(lines) if isinstance(line, Costs)), None)


_SEARCHED_BYTES = 4096


def records_path(folder: Path) -> Path:
    """Return where the records of a comparison lie in its folder."""
    return folder / "records.jsonl"


class RecordFile:
    """A file of records that is only ever appended to. A line that was cut off by a crash is as if never written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._locked: BinaryIO | None = None

    def read(self) -> list[Line]:
        """Every whole line, in order; none if there is no file."""
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().split(b"\n")[:-1]
        return [self._parse(number, line) for number, line in enumerate(lines, start=1)]

    def has_lines(self) -> bool:
        """Whether anything was recorded; to lock the file makes an empty one."""
        return self.path.exists() and self.path.stat().st_size > 0

    @contextmanager
    def lock(self) -> Generator[None]:
        """Keep other processes from working on the same file; raise InputError if one does already."""
        with self.path.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                expected = "a folder in which no other command is at work"
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
        """Add a line, and see it safely on the disk.

        While the file is locked, a `FileNotFoundError` says that it was removed or replaced: a new one would lack all
        earlier lines, and others could lock it.
        """
        self._require_locked_in_place()
        text = json.dumps(add_checksum(encode(line)), allow_nan=False).encode() + b"\n"
        with explain_os_errors(self.path, len(text)), self.path.open("a+b") as file:
            file.truncate(_end_of_last_line(file))
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def _require_locked_in_place(self) -> None:
        if self._locked is None:
            return
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._locked.fileno()), self.path.stat()):
                return
        raise FileNotFoundError(
            f"{self.path} was removed or replaced while this command was at work, so that nothing more can be added to "
            "it. Run the command again: it does anew what is not on record."
        )


def _end_of_last_line(file: BinaryIO) -> int:
    """Number of bytes up to the end of the last whole line, searched for from the end of the file."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - _SEARCHED_BYTES)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
