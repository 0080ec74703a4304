"""Settings that an earlier comparison chose by tuning, for comparisons of the same task and size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, cast

from tidegate._json import decode, parse_json, verify_checksum
from tidegate._validation import InputError
from tidegate.config import Init
from tidegate.lab.compare.tuning import Setting, choose_settings
from tidegate.lab.tasks.task import Task
from tidegate.lab.training.records import Grid, Line, Plan, Record, RecordFile, Variant, records_path

STANDARD_SETTINGS = Path(__file__).with_name("standard_settings.json")
"""Settings of the standard task at its default size, which come with the package."""
_DECISIVE = ("kind", "fingerprint", "tokenizer", "length", "validation_share")
"""Facts of a task that settings are tuned for."""
_MIN_PAIRS = 3
"""Fewer differences say little about how far they scatter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedSetting:
    """The setting that one variant was trained with, and how far its runs scatter at it."""

    gate: str
    """As it is spelled."""
    overrides: dict[str, float | str] = field(default_factory=dict)
    """The variant's own options."""
    lr: float
    init: float | str
    num_blocks: int
    """Blocks that chose this setting."""
    noise: float | None
    """Standard deviation between seeds of its difference to the control, both at these settings, as a share of the
    control's loss; None for the control, and where too few blocks of both were trained at them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedSettings:
    """The settings that a comparison with tuning chose."""

    task: dict[str, Any]
    """Facts of the task that decide whether settings go over to another comparison."""
    preset: str
    budget: int
    """Tokens, or images, of each run that tuned."""
    num_blocks: int
    variants: tuple[TunedSetting, ...]
    """The control's first."""
    source: str
    """Where they come from, in words."""

    def find(self, variant: Variant) -> TunedSetting | None:
        """Return what a variant was tuned to, whatever its name; None if it was not tuned."""
        key = (variant.gate, variant.overrides)
        return next((own for own in self.variants if (own.gate, own.overrides) == key), None)

    def setting_of(self, variant: Variant) -> Setting:
        """Return the setting of a variant: its own if it was tuned, else the control's."""
        found = self.find(variant) or self.variants[0]
        return Setting(lr=found.lr, init=cast("Init", found.init))

    def noise_of(self, variant: Variant) -> float | None:
        """Return the noise of a variant, or the largest that is known if it was not tuned; None if none is known."""
        found = self.find(variant)
        if found is not None and found.noise is not None:
            return found.noise
        return max((own.noise for own in self.variants if own.noise is not None), default=None)

    def fits(self, task: Task, preset: str) -> bool:
        """Return whether they were tuned on this task at this size."""
        return self.preset == preset and self.task == _decisive_facts(task.to_dict())

    def in_words(self, *, budget: int) -> str:
        """Return where they come from, and whether runs of another budget, in tokens or images, may want others."""
        examples = "images" if self.task["kind"] == "image" else "tokens"
        doubt = "" if budget == self.budget else f"; these runs have {budget:,}, and may want other ones"
        return f"{self.source}, tuned on this data at {self.budget:,} {examples} in {self.num_blocks} blocks{doubt}"


def _decisive_facts(task: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a task on which the best settings may depend."""
    return {name: task[name] for name in _DECISIVE if name in task}


def settings_of_records(lines: Sequence[Line], *, source: str) -> TunedSettings:
    """Take for each variant the setting that most blocks chose; of equally many, the one with the lower mean loss.

    Raise InputError if these are not the records of a complete comparison with tuning.
    """
    plan = next((line for line in lines if isinstance(line, Plan)), None)
    if plan is None or plan.grid is None or not plan.grid.chooses:
        raise InputError("settings", expected="of a comparison that tuned", got=source)
    records = [line for line in lines if isinstance(line, Record) and line.status != "failed"]
    tried = [record for record in records if record.run.role == "tuning"]
    compared = [record for record in records if record.run.role == "comparison"]
    chosen = choose_settings(tried)
    if len(compared) < plan.num_seeds * len(plan.variants) or len(chosen) < len(compared):
        hint = "Finish that comparison first."
        raise InputError("settings", expected="of a complete comparison", got=source, hint=hint)
    variants = sorted(plan.variants, key=lambda variant: variant.name != plan.control)
    prevailing = {variant.name: _prevailing(variant.name, chosen, tried) for variant in variants}
    losses = {name: _losses_at(setting, compared, name) for name, (setting, _) in prevailing.items()}
    tuned: list[TunedSetting] = []
    for variant in variants:
        setting, num_blocks = prevailing[variant.name]
        is_control = variant.name == plan.control
        tuned.append(
            TunedSetting(
                gate=variant.gate,
                overrides=variant.overrides,
                lr=setting.lr,
                init=setting.init,
                num_blocks=num_blocks,
                noise=None if is_control else _noise(losses[variant.name], losses[plan.control]),
            )
        )
    return TunedSettings(
        task=_decisive_facts(plan.task.to_dict()),
        preset=plan.preset,
        budget=plan.budget,
        num_blocks=plan.num_seeds,
        variants=tuple(tuned),
        source=source,
    )


def with_noise_of(settings: TunedSettings, lines: Sequence[Line]) -> TunedSettings:
    """Return the settings with the noise of a later comparison that was made at them, where it has the variants."""
    plan = next(line for line in lines if isinstance(line, Plan))
    compared = [line for line in lines if isinstance(line, Record) and line.run.role == "comparison"]
    losses = {v.name: _losses_at(settings.setting_of(v), compared, v.name) for v in plan.variants}
    variants: list[TunedSetting] = []
    for own in settings.variants:
        later = [v.name for v in plan.variants if settings.find(v) is own and v.name != plan.control]
        variants.append(replace(own, noise=_noise(losses[later[-1]], losses[plan.control])) if later else own)
    return replace(settings, variants=tuple(variants))


def read_settings(place: Path) -> TunedSettings:
    """Read the settings that the comparison in a folder chose; raise InputError if there are none."""
    file = place if place.is_file() else records_path(place)
    if not file.exists():
        expected = "a folder with the records of a comparison that tuned"
        raise InputError("settings", expected=expected, got=place)
    return settings_of_records(RecordFile(file).read(), source=str(place))


def find_settings(
    asked: str | None, variants: Iterable[Variant], task: Task, preset: str, grid: Grid | None
) -> TunedSettings | None:
    """Return the settings of a folder, none for `none`, or by default the standard ones if they fit.

    They fit the standard task at its default size, if every variant was tuned: settings of some alone would favour
    them. A grid gives every variant the same points to try, so that nothing is set before.
    """
    if asked is not None:
        return None if asked == "none" else read_settings(Path(asked))
    standard = standard_settings()
    fits = grid is None and standard.fits(task, preset) and all(map(standard.find, variants))
    return standard if fits else None


def standard_settings() -> TunedSettings:
    """Return the settings that come with the package, for the standard task at its default size."""
    return decode(TunedSettings, verify_checksum(parse_json(STANDARD_SETTINGS.read_text(encoding="utf-8"))))


def _prevailing(name: str, chosen: Mapping[tuple[str, int], Setting], tried: Iterable[Record]) -> tuple[Setting, int]:
    """Return the setting that most blocks of a variant chose, and how many; of equals, that of the lower mean loss."""
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
    """Return the losses by block of a variant's runs that were trained at a setting, and did not diverge."""
    return {
        record.run.block: record.loss
        for record in records
        if record.loss is not None
        and record.run.variant == name
        and (record.run.training.lr, record.run.model.init) == (setting.lr, setting.init)
    }


def _noise(own: Mapping[int, float], control: Mapping[int, float]) -> float | None:
    """Return the deviation of the differences, as a share of the control's mean; None with few blocks of both."""
    blocks = sorted(own.keys() & control.keys())
    if len(blocks) < _MIN_PAIRS:
        return None
    return stdev(own[block] - control[block] for block in blocks) / fmean(control[block] for block in blocks)
