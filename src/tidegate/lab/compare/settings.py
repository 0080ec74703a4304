"""Settings that an earlier comparison chose by tuning, for comparisons of the same task and size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, cast

from tidegate.config import Init
from tidegate.lab.compare.tuning import Setting, choose_settings
from tidegate.lab.tasks.task import Task
from tidegate.lab.training.records import Line, Plan, Record, RecordFile, VariantPlan, records_path

_DECISIVE = ("kind", "fingerprint", "tokenizer", "length", "validation_share")
"""Facts of a task that settings are tuned for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedVariant:
    """What one variant was trained with, and how far its runs scatter."""

    gate: str
    """As it is spelled."""
    overrides: dict[str, float | str] = field(default_factory=dict)
    """Options of its own."""
    lr: float
    init: float | str
    num_blocks: int
    """Blocks that chose this setting."""
    noise: float | None
    """Standard deviation between seeds of its difference to the control, as a share of the control's loss; None for
    the control."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedSettings:
    """What a comparison with tuning chose."""

    task: dict[str, Any]
    """Facts of the task that decide whether settings go over to another comparison."""
    preset: str
    budget: int
    """Tokens, or images, of each run that tuned."""
    num_blocks: int
    variants: tuple[TunedVariant, ...]
    """The control first."""
    source: str
    """Where they come from, in words."""

    def setting_of(self, variant: VariantPlan) -> Setting:
        """The setting of a variant: its own if it was tuned, else the control's."""
        found = self._find(variant) or self.variants[0]
        return Setting(lr=found.lr, init=cast("Init", found.init))

    def noise_of(self, variant: VariantPlan) -> float | None:
        """The noise of a variant, or the largest that is known if it was not tuned; None if none is known."""
        found = self._find(variant)
        if found is not None and found.noise is not None:
            return found.noise
        return max((own.noise for own in self.variants if own.noise is not None), default=None)

    def fits(self, task: Task, preset: str) -> bool:
        """Whether they were tuned on this task at this size."""
        return self.preset == preset and self.task == decisive_facts(task.to_dict())

    def in_words(self) -> str:
        """Where they come from, for the page."""
        return f"{self.source}, tuned on this data at {self.budget:,} examples in {self.num_blocks} blocks"

    def _find(self, variant: VariantPlan) -> TunedVariant | None:
        pairs = ((own, (own.gate, own.overrides)) for own in self.variants)
        return next((own for own, key in pairs if key == (variant.gate, variant.overrides)), None)


def decisive_facts(task: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a task on which the best settings may depend."""
    return {name: task[name] for name in _DECISIVE if name in task}


def settings_of_records(lines: Sequence[Line], *, source: str) -> TunedSettings:
    """Take for each variant the setting that most blocks chose; of equally many, the one with the lower mean loss.

    A `ValueError` says what is missing if these are not the records of a complete comparison with tuning.
    """
    plan = next((line for line in lines if isinstance(line, Plan)), None)
    if plan is None or plan.grid is None or not plan.grid.chooses:
        raise ValueError("there is no comparison with --tune on record")
    records = [line for line in lines if isinstance(line, Record) and line.status != "failed"]
    tried = [record for record in records if record.run["role"] == "tuning"]
    compared = [record for record in records if record.run["role"] == "comparison"]
    chosen = choose_settings(tried)
    if len(compared) < plan.num_seeds * len(plan.variants) or len(chosen) < len(compared):
        raise ValueError("the comparison is not complete")
    losses = {name: _losses(compared, name) for name in (variant.name for variant in plan.variants)}
    return TunedSettings(
        task=decisive_facts(plan.task),
        preset=plan.preset,
        budget=plan.budget,
        num_blocks=plan.num_seeds,
        variants=tuple(
            _tuned(variant, chosen, tried, _noise(losses[variant.name], losses[plan.control]))
            for variant in sorted(plan.variants, key=lambda variant: variant.name != plan.control)
        ),
        source=source,
    )


def read_settings(place: Path) -> TunedSettings:
    """Read the settings that the comparison in a folder chose; a `ValueError` says why there are none."""
    file = place if place.is_file() else records_path(place)
    if not file.exists():
        raise ValueError(f"settings must be a folder with the records of a comparison with --tune; got {place}.")
    try:
        return settings_of_records(RecordFile(file).read(), source=str(place))
    except ValueError as problem:
        raise ValueError(f"settings cannot be taken from {place}: {str(problem).rstrip('.')}.") from None


def _tuned(
    variant: VariantPlan,
    chosen: Mapping[tuple[str, int], Setting],
    tried: Iterable[Record],
    noise: float | None,
) -> TunedVariant:
    own = {block: setting for (name, block), setting in chosen.items() if name == variant.name}
    counts = Counter(own.values())
    losses = {
        (record.run["block"], record.run["training"]["lr"], record.run["model"]["init"]): record.loss
        for record in tried
        if record.run["variant"] == variant.name
    }

    def order(setting: Setting) -> tuple[float, float]:
        found = [losses[block, setting.lr, setting.init] for block, chose in own.items() if chose == setting]
        known = [loss for loss in found if loss is not None]
        return -counts[setting], fmean(known) if known else float("inf")

    best = min(counts, key=order)
    return TunedVariant(
        gate=variant.gate,
        overrides=variant.overrides,
        lr=best.lr,
        init=best.init,
        num_blocks=counts[best],
        noise=noise,
    )


def _losses(records: Iterable[Record], name: str) -> list[float | None]:
    own = sorted((r for r in records if r.run["variant"] == name), key=lambda r: r.run["block"])
    return [record.loss for record in own]


def _noise(own: Sequence[float | None], control: Sequence[float | None]) -> float | None:
    """Deviation of the differences, as a share of the control's mean; None of the control, and of fewer than two."""
    pairs = [(one, other) for one, other in zip(own, control, strict=True) if one is not None and other is not None]
    if len(pairs) < 2 or own == control:
        return None
    return stdev(one - other for one, other in pairs) / fmean(other for _, other in pairs)
