"""What is asked for: variants as the command line spells them, sizes to start from, and the request itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, cast

from tidegate._text import echo
from tidegate.config import TransformerConfig, VisionConfig
from tidegate.gates import Gates
from tidegate.lab.compare.settings import TunedSettings
from tidegate.lab.judging import MARGIN
from tidegate.lab.tasks.task import Task, TaskData, TaskKind
from tidegate.lab.training.machine import require_device
from tidegate.lab.training.presets import SIZES
from tidegate.lab.training.records import Grid, Match, Search, VariantPlan
from tidegate.lab.training.run import ModelConfig, Run, Training

TRAINING_OPTIONS = ("lr", "gate_lr", "weight_decay", "warmup", "final_lr", "clip", "first_seed")
"""Numbers of the training that a variant may set for itself."""
OPTIONS = (*TRAINING_OPTIONS, "init", "d_ff", "qk_norm", "params", "placebo")
"""All that a variant may set for itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A gate under a name, perhaps with options of its own."""

    name: str
    gates: Gates
    training: dict[str, float] = field(default_factory=dict)
    """Of `Training`."""
    model: dict[str, Any] = field(default_factory=dict)
    """Of the model's configuration: `init`, `d_ff`, `qk_norm`."""
    params: str | None = None
    """A variant whose number of parameters it is widened to; None leaves its width."""
    first_seed: int = 0
    """Its seeds begin here; the control's begin at 0, and only equal seeds share initial values and batches."""

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Read one variant; a `ValueError` says what is wrong with it."""
        spelled, *options = text.split("@")
        name, named, gate = spelled.rpartition("=")
        if named and not name.strip():
            raise ValueError(f"The variant {echo(text)} has an empty name. Write name=gate, or the gate alone.")
        given = dict(_option(option, text) for option in options)
        gates = Gates.parse(gate.strip())
        if placebo := given.pop("placebo", None):
            gates = _as_placebo(gates, placebo, text)
        return cls(
            name=name.strip() or text.strip(),
            gates=gates,
            model={option: given.pop(option) for option in ("init", "d_ff", "qk_norm") if option in given},
            params=given.pop("params", None),
            first_seed=given.pop("first_seed", 0),
            training=given,
        )

    @property
    def options(self) -> dict[str, float | str]:
        """All options of its own, as the records have them."""
        apart: dict[str, float | str] = {} if self.params is None else {"params": self.params}
        apart |= {"first_seed": self.first_seed} if self.first_seed else {}
        apart |= {option: _as_word(value) for option, value in self.model.items()}
        return {**self.training, **apart}

    def plan(self) -> VariantPlan:
        """As the records have it."""
        return VariantPlan(name=self.name, gate=str(self.gates), overrides=self.options)


def parse_variants(text: str) -> tuple[Variant, ...]:
    """Read a list of variants, parted by commas; the first is the control. Names must differ."""
    variants = tuple(Variant.parse(part) for part in text.split(",") if part.strip())
    if len(variants) < 2:
        raise ValueError(f"variants must be at least two, the control first, such as none,bma; got {echo(text)}.")
    _require_distinct([variant.name for variant in variants])
    return variants


def _option(option: str, text: str) -> tuple[str, Any]:
    name, equals, value = option.partition("=")
    name, value = name.strip().replace("-", "_"), value.strip()
    if name not in OPTIONS or not equals:
        raise ValueError(
            f"{echo(option)} in {echo(text)} is no option of a variant. Write @name=value, name one of "
            f"{', '.join(OPTIONS)}."
        )
    match name:
        case "placebo" | "params":
            return name, value
        case "init" if value in ("fan-in", "torch"):
            return name, value
        case "qk_norm":
            if value not in ("yes", "no"):
                raise ValueError(f"qk_norm of the variant {echo(text)} must be yes or no; got {echo(value)}.")
            return name, value == "yes"
        case "first_seed" | "d_ff":
            return name, _whole_number(name, value, text)
        case _:
            return name, _number(name, value, text)


def _number(name: str, value: str, text: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} of the variant {echo(text)} must be a finite number; got {echo(value)}.")
    return number


def _whole_number(name: str, value: str, text: str) -> int:
    number = _number(name, value, text)
    if not number.is_integer() or number < 0:
        raise ValueError(f"{name} must be a whole number of at least 0; got {number:g} in {echo(text)}.")
    return int(number)


def _as_word(value: Any) -> float | str:
    return ("yes" if value else "no") if isinstance(value, bool) else value


def _as_placebo(gates: Gates, placebo: str, text: str) -> Gates:
    if not gates:
        raise ValueError(f"The variant {echo(text)} has no gate, and so no placebo. Leave @placebo out.")
    if any(gate.placebo is not None for gate in gates):
        raise ValueError(f"The variant {echo(text)} names its placebo twice. Leave one of them out.")
    return Gates(replace(gate, placebo=cast("Any", placebo)) for gate in gates)


def _require_distinct(names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"Two variants are called {', '.join(twice)}. Name them apart, as in first=none,second=none.")


_MOST_SEEDS = 10_000

PresetName: TypeAlias = Literal["tiny", "small", "base"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A model's sizes and its training's."""

    d_model: int
    num_layers: int
    num_heads: int
    length: int | None = None
    """Tokens of a training example; None leaves it to the task."""
    batch_size: int
    budget: int
    """Tokens, or images, to train on."""
    lr: float
    patch_size: int = 4
    """Of images."""

    def model(self, task: Task, data: TaskData, gates: Gates) -> ModelConfig:
        """The configuration of this size for a task."""
        sizes: dict[str, Any] = {"d_model": self.d_model, "num_layers": self.num_layers, "num_heads": self.num_heads}
        if task.kind == "image":
            size, channels = data.facts["image_size"], data.facts["channels"]
            patch_size = self.patch_size if size % self.patch_size == 0 and size > 8 else 2 if size % 2 == 0 else 1
            return VisionConfig(
                gate=gates,
                **sizes,
                image_size=size,
                patch_size=patch_size,
                channels=channels,
                num_classes=data.vocab_size,
            )
        return TransformerConfig(gate=gates, **sizes, vocab_size=data.vocab_size, max_length=task.length)

    def training(self, task: Task, budget: int | None = None) -> Training:
        """The training of this size: as many whole steps as the budget has, at least one."""
        per_step = self.batch_size * task.length
        return Training(
            steps=max(1, round((self.budget if budget is None else budget) / per_step)),
            batch_size=self.batch_size,
            lr=self.lr,
        )


def _decoder(name: PresetName, *, budget: int, lr: float) -> Preset:
    size = SIZES[name]
    return Preset(
        d_model=size.d_model,
        num_layers=size.num_layers,
        num_heads=size.num_heads,
        length=size.length,
        batch_size=size.batch_size,
        budget=budget,
        lr=lr,
    )


PRESETS: dict[TaskKind, dict[PresetName, Preset]] = {
    "lm": {
        "tiny": _decoder("tiny", budget=1_638_400, lr=3e-3),
        "small": _decoder("small", budget=20_971_520, lr=3e-3),
        "base": _decoder("base", budget=301_989_888, lr=1e-3),
    },
    "image": {
        "tiny": Preset(d_model=48, num_layers=2, num_heads=4, batch_size=64, budget=64_000, lr=2e-3, patch_size=2),
        "small": Preset(d_model=96, num_layers=4, num_heads=4, batch_size=64, budget=320_000, lr=1e-3),
        "base": Preset(d_model=192, num_layers=8, num_heads=6, batch_size=128, budget=6_400_000, lr=1e-3),
    },
    "recall": {
        "tiny": Preset(d_model=64, num_layers=2, num_heads=2, batch_size=64, budget=4_608_000, lr=2e-3),
        "small": Preset(d_model=128, num_layers=2, num_heads=4, batch_size=64, budget=18_432_000, lr=1e-3),
        "base": Preset(d_model=256, num_layers=4, num_heads=8, batch_size=128, budget=98_304_000, lr=1e-3),
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What to compare."""

    variants: tuple[Variant, ...]
    """The first is the control."""
    task: Task
    preset: PresetName = "tiny"
    num_seeds: int = 5
    budget: int | None = None
    """Tokens, or images, that the control is trained on; None takes the preset's."""
    match: Match = "tokens"
    grid: Grid | None = None
    """Tune every variant over this, inside each block; None tunes nothing."""
    settings: TunedSettings | None = None
    """Learning rates and starts that were tuned before; None takes the preset's."""
    device: str = "cpu"
    """Where models are trained, as PyTorch names it."""
    margin: float = MARGIN
    """Differences below this share of the control's loss do not matter."""
    command: str = ""
    """What to type to get this again."""
    runs: tuple[Run, ...] = ()
    """Runs that were made elsewhere; they take the place of all that the request would make."""

    def __post_init__(self) -> None:
        if self.num_seeds < 1:
            raise ValueError(f"num_seeds must be at least 1; got {self.num_seeds}. Three are needed for a verdict.")
        if self.num_seeds > _MOST_SEEDS:
            raise ValueError(f"num_seeds must be at most {_MOST_SEEDS:,}; got {self.num_seeds}.")
        if self.budget is not None and not 1 <= self.budget < 2**63:
            raise ValueError(f"budget must be at least 1 and fit into 64 bits; got {self.budget}.")
        if not 0 <= self.margin < math.inf:
            raise ValueError(f"margin must be a finite number of at least 0; got {self.margin}.")
        if len(self.variants) < 2:
            raise ValueError(f"variants must be at least two, the control first; got {len(self.variants)}.")
        if self.grid is not None and self.settings is not None:
            raise ValueError(
                "settings were tuned before, and --tune and --map try the same points for all. Leave one out."
            )
        if self.settings is not None and not self.settings.fits(self.task, self.preset):
            raise ValueError(
                f"settings of {self.settings.source} were tuned on other data or for another size: preset "
                f"{self.settings.preset}, {self.settings.task}. Tune anew with --tune, or leave --settings out."
            )
        if self.grid is not None and (own := [v.name for v in self.variants if {"lr", "init"} & set(v.options)]):
            raise ValueError(f"tune chooses rates and starts, which {', '.join(own)} has set. Leave one of them out.")
        for variant in self.variants:
            _require_sense(variant, [other.name for other in self.variants])
        _require_design(self.runs)
        require_device(self.device)

    @property
    def control(self) -> Variant:
        """What the others are compared with."""
        return self.variants[0]


def grid_of(rates: str | None, starts: str | None, *, search: Search, chooses: bool) -> Grid:
    """The grid that the command line describes.

    rates  : multiples of the learning rate, parted by commas; None takes the usual three
    starts : values of `init`, parted by commas; None takes the usual three
    """
    return Grid(
        rates=GRID.rates if rates is None else _parse_rates(rates),
        starts=GRID.starts if starts is None else _parse_starts(starts),
        search=search,
        chooses=chooses,
    )


def _parse_starts(starts: str) -> tuple[float | str, ...]:
    found = tuple(_option(f"init={start}", starts)[1] for start in starts.split(","))
    if len(set(found)) < len(found):
        raise ValueError(f"starts must be different ones, such as 0.02,fan-in,torch; got {echo(starts)}.")
    return found


def _parse_rates(rates: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(rate) for rate in rates.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 < rate < math.inf for rate in numbers) or len(set(numbers)) < len(numbers):
        raise ValueError(f"rates must be different numbers above 0, such as 0.5,1,2; got {echo(rates)}.")
    return tuple(sorted(numbers))


GRID = Grid(rates=(0.5, 1.0, 2.0), starts=(0.02, "fan-in", "torch"))
"""What `--tune` tries."""


def _require_sense(variant: Variant, names: Sequence[str]) -> None:
    """Refuse a variant that cannot differ from another, or that refers to none."""
    if variant.params is not None and variant.params not in (name for name in names if name != variant.name):
        raise ValueError(
            f"params of the variant {variant.name} must name another variant whose parameters it is to have; got "
            f"{echo(variant.params)}."
        )
    undone = [str(gate) for gate in variant.gates if gate.is_undone_by_norm]
    if undone and variant.model.get("qk_norm"):
        raise ValueError(
            f"The variant {variant.name} normalises queries and keys, which undoes its gate {undone[0]}: a factor of a "
            "whole query or key. Use grain 'element', another site, or leave qk_norm out."
        )


def _require_design(runs: Sequence[Run]) -> None:
    """Refuse given runs unless there is one of each variant in each block, all of one task."""
    blocks: dict[str, list[int]] = {}
    for run in runs:
        blocks.setdefault(run.variant, []).append(run.block)
    if any(sorted(own) != list(range(len(runs) // len(blocks))) for own in blocks.values()):
        raise ValueError(f"Given runs are one of each variant in each block, blocks counted from 0; got {blocks}.")
    if len({run.task for run in runs}) > 1 or any(run.role != "comparison" for run in runs):
        raise ValueError("Given runs are of one task, and all have the role 'comparison'.")
