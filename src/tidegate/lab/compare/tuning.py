"""Tuning of learning rates and initializations: the trials, the selection, and settings of earlier searches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from tidegate._json import decode, parse_json, verify_checksum
from tidegate._validation import InputError
from tidegate.config import Init
from tidegate.lab.tasks.task import Task
from tidegate.lab.training.records import Grid, Line, Plan, Record, RecordFile, Variant, records_path
from tidegate.lab.training.run import Run

STANDARD_SETTINGS = Path(__file__).with_name("standard_settings.json")
"""Settings for the standard task at its default size, which ship with the package."""
_FIRST_TUNING_SEED = 1_000_000
"""First seed of the trials, unless the seeds of the comparison reach as far."""
_DECISIVE = ("kind", "fingerprint", "tokenizer", "length", "validation_share")
"""Facts of a task that the best settings may depend on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One point of the grid: a learning rate and an initialization."""

    lr: float
    init: Init

    def given_to(self, run: Run) -> Run:
        """Return the run with this setting."""
        return replace(run, model=replace(run.model, init=self.init), training=replace(run.training, lr=self.lr))


def next_trials(base: Mapping[str, Run], grid: Grid, *, num_seeds: int, done: Sequence[Record]) -> list[Run]:
    """Return the next trials of every variant and seed; none once all are done.

    `base` has the first run of each variant, `done` the records of all earlier trials. Trials have full length. Each
    seed of the comparison has its own trials, on another seed, so selection noise differs between seeds and widens the
    intervals. With one selection for all seeds, it would be a constant difference between variants that looks like an
    effect.
    """
    first = num_seeds + max(_FIRST_TUNING_SEED, *(run.seed for run in base.values()))
    best = choose_settings(done)
    wanted = [
        replace(
            Setting(lr=run.training.lr * rate, init=cast("Init", start)).given_to(as_trial(run)),
            block=block,
            seed=first + block,
        )
        for block in range(num_seeds)
        for start in grid.starts
        for rate in grid.rates
        for name, run in base.items()
        if _is_tried(start, rate, grid, best.get((name, block)))
    ]
    known = {record.id for record in done}
    return [run for run in wanted if run.id not in known]


def as_trial(run: Run) -> Run:
    """Return the run as a tuning trial, which is evaluated once, at its end."""
    return replace(run, role="tuning", training=replace(run.training, num_evaluations=1, num_observations=1))


def num_trials(grid: Grid) -> int:
    """Return the number of trials per variant and seed."""
    starts, rates = len(grid.starts), len(grid.rates)
    return starts * rates if grid.search == "grid" else starts + rates - 1


def _is_tried(start: float | str, rate: float, grid: Grid, best: Setting | None) -> bool:
    if grid.search == "grid" or rate == grid.middle:
        return True
    return best is not None and best.init == start


def choose_settings(records: Iterable[Record]) -> dict[tuple[str, int], Setting]:
    """Select for each variant and block the setting with the lowest loss.

    A variant that diverged at every setting gets the lowest rate.
    """
    tried: dict[tuple[str, int], list[tuple[float, float, Setting]]] = {}
    for record in records:
        loss, setting = math.inf if record.loss is None else record.loss, _setting_of(record)
        tried.setdefault((record.run.variant, record.run.block), []).append((loss, setting.lr, setting))
    return {key: min(points, key=lambda point: point[:2])[2] for key, points in tried.items()}


def _setting_of(record: Record) -> Setting:
    return Setting(lr=record.run.training.lr, init=record.run.model.init)


def rate_of(record: Record) -> float:
    """Return the learning rate of a run."""
    return record.run.training.lr


def start_of(record: Record) -> str:
    """Return the initialization of a run."""
    return spell_value(record.run.model.init)


def spell_value(value: float | str) -> str:
    """Return the value of an option as text."""
    return value if isinstance(value, str) else f"{value:g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedVariant:
    """The setting that most seeds selected for one variant."""

    gate: str
    """Its spelling."""
    overrides: dict[str, float | str]
    """Its own options."""
    setting: Setting


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedSettings:
    """The settings that a comparison with tuning selected."""

    task: dict[str, Any]
    """Facts of the task that settings may depend on."""
    preset: str
    budget: int
    """Training tokens, or images, of each trial."""
    num_blocks: int
    variants: tuple[TunedVariant, ...]
    """The baseline first."""
    source: str
    """Their source, in words."""

    def find(self, variant: Variant) -> Setting | None:
        """Return the setting of a variant with this gate and these options; None if it was not tuned."""
        key = (variant.gate, variant.overrides)
        return next((own.setting for own in self.variants if (own.gate, own.overrides) == key), None)

    def setting_of(self, variant: Variant) -> Setting:
        """Return the setting of a variant: its own if it was tuned, else the baseline's."""
        return self.find(variant) or self.variants[0].setting

    def fits(self, task: Task, preset: str) -> bool:
        """Return whether they were tuned on this task at this size."""
        return self.preset == preset and self.task == decisive_facts(task.to_dict())

    def in_words(self, *, budget: int) -> str:
        """Return their source, and a warning if they were tuned for another budget."""
        examples = "images" if self.task["kind"] == "image" else "tokens"
        doubt = "" if budget == self.budget else f"; these runs have {budget:,} and may need other settings"
        return f"{self.source}, tuned on this data with {self.budget:,} {examples} and {self.num_blocks} seeds{doubt}"


def decisive_facts(task: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a task that the best settings may depend on."""
    return {name: task[name] for name in _DECISIVE if name in task}


def settings_of_records(lines: Sequence[Line], *, source: str) -> TunedSettings:
    """Return for each variant the setting that most blocks selected; ties go to the lower mean loss.

    Raises:
        InputError: The records are not of a complete comparison with tuning.
    """
    plan = next((line for line in lines if isinstance(line, Plan)), None)
    if plan is None or plan.grid is None or not plan.grid.chooses:
        raise InputError("settings", expected="of a comparison with tuning", got=source)
    records = [line for line in lines if isinstance(line, Record) and line.status != "failed"]
    tried = [record for record in records if record.run.role == "tuning"]
    num_compared = sum(record.run.role == "comparison" for record in records)
    chosen = choose_settings(tried)
    if num_compared < plan.num_seeds * len(plan.variants) or len(chosen) < num_compared:
        hint = "Finish that comparison first."
        raise InputError("settings", expected="of a complete comparison", got=source, hint=hint)
    return TunedSettings(
        task=decisive_facts(plan.task.to_dict()),
        preset=plan.preset,
        budget=plan.budget,
        num_blocks=plan.num_seeds,
        variants=tuple(
            TunedVariant(gate=v.gate, overrides=v.overrides, setting=_prevailing(v.name, chosen, tried))
            for v in sorted(plan.variants, key=lambda variant: variant.name != plan.control)
        ),
        source=source,
    )


def _prevailing(name: str, chosen: Mapping[tuple[str, int], Setting], tried: Iterable[Record]) -> Setting:
    losses: dict[Setting, list[float | None]] = {}
    for record in tried:
        if record.run.variant == name and chosen[name, record.run.block] == (setting := _setting_of(record)):
            losses.setdefault(setting, []).append(record.loss)

    def order(setting: Setting) -> tuple[int, float]:
        known = [loss for loss in losses[setting] if loss is not None]
        return -len(losses[setting]), fmean(known) if known else math.inf

    return min(losses, key=order)


def find_settings(
    asked: str | None, variants: Iterable[Variant], task: Task, preset: str, grid: Grid | None
) -> TunedSettings | None:
    """Return the settings of a folder, no settings for `none`, or by default the standard settings if they fit.

    These fit the standard task at its default size if they have every variant: tuning only some would favor them. With
    a grid there are no earlier settings.
    """
    if asked == "none":
        return None
    if asked is not None:
        file = Path(asked) if Path(asked).is_file() else records_path(Path(asked))
        if not file.exists():
            expected = "a folder with the records of a comparison with tuning"
            raise InputError("settings", expected=expected, got=asked)
        return settings_of_records(RecordFile(file).read(), source=asked)
    standard = standard_settings()
    fits = grid is None and standard.fits(task, preset) and all(map(standard.find, variants))
    return standard if fits else None


def standard_settings() -> TunedSettings:
    """Return the settings for the standard task at its default size, which ship with the package."""
    return decode(TunedSettings, verify_checksum(parse_json(STANDARD_SETTINGS.read_text(encoding="utf-8"))))
