"""Settings that an earlier comparison chose by tuning, for comparisons of the same task and size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, cast

from tidegate._json import decode, parse_json, verify_checksum
from tidegate.config import Init
from tidegate.lab.compare.tuning import Setting, choose_settings
from tidegate.lab.tasks.task import Task
from tidegate.lab.training.records import Grid, Line, Plan, Record, RecordFile, VariantPlan, records_path

STANDARD_SETTINGS = Path(__file__).with_name("standard_settings.json")
"""Settings of the standard task at its default size, which come with the package."""
_DECISIVE = ("kind", "fingerprint", "tokenizer", "length", "validation_share")
"""Facts of a task that settings are tuned for."""
_MIN_PAIRS = 3
"""Fewer differences say little about how far they scatter."""


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
    """Standard deviation between seeds of its difference to the control, both at these settings, as a share of the
    control's loss; None for the control, and where too few blocks of both were trained at them."""


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

    def has_tuned(self, variant: VariantPlan) -> bool:
        """Whether a variant has a setting of its own."""
        return self._find(variant) is not None

    def noise_of(self, variant: VariantPlan) -> float | None:
        """The noise of a variant, or the largest that is known if it was not tuned; None if none is known."""
        found = self._find(variant)
        if found is not None and found.noise is not None:
            return found.noise
        return max((own.noise for own in self.variants if own.noise is not None), default=None)

    def fits(self, task: Task, preset: str) -> bool:
        """Whether they were tuned on this task at this size."""
        return self.preset == preset and self.task == decisive_facts(task.to_dict())

    def in_words(self, *, budget: int) -> str:
        """Where they come from, for the page, and whether runs of another length may want others.

        budget : tokens, or images, of the runs that they are for
        """
        examples = "images" if self.task["kind"] == "image" else "tokens"
        doubt = "" if budget == self.budget else f"; these runs have {budget:,}, and may want other ones"
        return f"{self.source}, tuned on this data at {self.budget:,} {examples} in {self.num_blocks} blocks{doubt}"

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
    tried = [record for record in records if record.run.role == "tuning"]
    compared = [record for record in records if record.run.role == "comparison"]
    chosen = choose_settings(tried)
    if len(compared) < plan.num_seeds * len(plan.variants) or len(chosen) < len(compared):
        raise ValueError("the comparison is not complete")
    names = sorted((variant.name for variant in plan.variants), key=lambda name: name != plan.control)
    tuned = {name: _prevailing(name, chosen, tried) for name in names}
    losses = {name: _losses_at(setting, compared, name) for name, (setting, _) in tuned.items()}
    plans = {variant.name: variant for variant in plan.variants}
    return TunedSettings(
        task=decisive_facts(plan.task.to_dict()),
        preset=plan.preset,
        budget=plan.budget,
        num_blocks=plan.num_seeds,
        variants=tuple(
            TunedVariant(
                gate=plans[name].gate,
                overrides=plans[name].overrides,
                lr=setting.lr,
                init=setting.init,
                num_blocks=num_blocks,
                noise=None if name == plan.control else _noise(losses[name], losses[plan.control]),
            )
            for name, (setting, num_blocks) in tuned.items()
        ),
        source=source,
    )


def with_noise_of(settings: TunedSettings, lines: Sequence[Line]) -> TunedSettings:
    """The same settings with the noise of a later comparison that was made at them, where that has the variants."""
    plan = next(line for line in lines if isinstance(line, Plan))
    compared = [line for line in lines if isinstance(line, Record) and line.run.role == "comparison"]
    losses = {v.name: _losses_at(settings.setting_of(v), compared, v.name) for v in plan.variants}
    found = {
        (variant.gate, tuple(variant.overrides.items())): _noise(losses[variant.name], losses[plan.control])
        for variant in plan.variants
        if variant.name != plan.control
    }
    variants = (
        replace(own, noise=found.get((own.gate, tuple(own.overrides.items())), own.noise)) for own in settings.variants
    )
    return replace(settings, variants=tuple(variants))


def read_settings(place: Path) -> TunedSettings:
    """Read the settings that the comparison in a folder chose; a `ValueError` says why there are none."""
    file = place if place.is_file() else records_path(place)
    if not file.exists():
        raise ValueError(f"settings must be a folder with the records of a comparison with --tune; got {place}.")
    try:
        return settings_of_records(RecordFile(file).read(), source=str(place))
    except ValueError as problem:
        raise ValueError(f"settings cannot be taken from {place}: {str(problem).rstrip('.')}.") from None


def find_settings(
    asked: str | None, variants: Iterable[VariantPlan], task: Task, preset: str, grid: Grid | None
) -> TunedSettings | None:
    """The settings that the command line asks for: of a folder, or `none`; by default the standard ones if they fit.

    They fit the standard task at its default size, if every variant was tuned: settings of some alone would favour
    them. A grid gives every variant the same points to try, so that nothing is set before.
    """
    if asked is not None:
        return None if asked == "none" else read_settings(Path(asked))
    standard = standard_settings()
    fits = grid is None and standard.fits(task, preset) and all(map(standard.has_tuned, variants))
    return standard if fits else None


def standard_settings() -> TunedSettings:
    """The settings that come with the package, for the standard task at its default size."""
    return decode(TunedSettings, verify_checksum(parse_json(STANDARD_SETTINGS.read_text(encoding="utf-8"))))


def _prevailing(name: str, chosen: Mapping[tuple[str, int], Setting], tried: Iterable[Record]) -> tuple[Setting, int]:
    """The setting that most blocks of a variant chose, and how many; of equally many, that of the lower mean loss."""
    own = {block: setting for (variant, block), setting in chosen.items() if variant == name}
    counts = Counter(own.values())
    losses = {
        (record.run.block, record.run.training.lr, record.run.model.init): record.loss
        for record in tried
        if record.run.variant == name
    }

    def order(setting: Setting) -> tuple[float, float]:
        found = [losses[block, setting.lr, setting.init] for block, chose in own.items() if chose == setting]
        known = [loss for loss in found if loss is not None]
        return -counts[setting], fmean(known) if known else float("inf")

    best = min(counts, key=order)
    return best, counts[best]


def _losses_at(setting: Setting, records: Iterable[Record], name: str) -> dict[int, float]:
    """The losses by block of a variant's runs that were trained at a setting, and did not diverge."""
    return {
        record.run.block: record.loss
        for record in records
        if record.loss is not None
        and record.run.variant == name
        and (record.run.training.lr, record.run.model.init) == (setting.lr, setting.init)
    }


def _noise(own: Mapping[int, float], control: Mapping[int, float]) -> float | None:
    """Deviation of the differences, as a share of the control's mean; None with fewer than three blocks of both."""
    blocks = sorted(own.keys() & control.keys())
    if len(blocks) < _MIN_PAIRS:
        return None
    return stdev(own[block] - control[block] for block in blocks) / fmean(control[block] for block in blocks)
