"""Whether a comparison was fair: what was to be equal, and whether the records say that it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from tidegate.lab.compare.summary import Summary, VariantSummary
from tidegate.lab.compare.tuning import rate_of, spell_value, start_of
from tidegate.lab.training.records import Record
from tidegate.report.page import Check

_PARAMETER_SHARE = 0.001
_FLOPS_SHARE = 0.01
_LATE = 0.8
"""Share of the training after which it is called late."""
_LATE_GAIN = 0.05
_EVALUATIONS_THAT_TELL = 5
"""With fewer, evenly spread, none lies within a fifth of the training before the last fifth."""
TOKENS_PER_PARAMETER = 5
"""A model that saw fewer is called under-trained."""
_EPOCHS = 4


def fairness_checks(summary: Summary) -> tuple[Check, ...]:
    """Check every condition of a fair comparison against the records."""
    return (*_equal_conditions(summary), *_budgets(summary), *_trained_enough(summary), *_settings(summary))


def violations_in_words(checks: Sequence[Check]) -> tuple[str, ...]:
    """One sentence on the conditions that were violated; none if all hold."""
    violated = [check for check in checks if check.state == "violated"]
    if not violated:
        return ()
    words = "; ".join(f"{check.name} ({check.detail})" for check in violated)
    num_checks = sum(check.state != "note" for check in checks)
    return (f"{len(violated)} of {num_checks} checks of fairness and training are violated: {words}.",)


def _equal_conditions(summary: Summary) -> Iterator[Check]:
    seeds = [[record.run.seed for record in variant.records] for variant in summary.variants]
    unpaired = [v.name for v, own in zip(summary.variants, seeds, strict=True) if own != seeds[0]]
    yield _check(
        "The same seeds",
        not unpaired,
        f"seeds {_join(seeds[0])} for every variant",
        f"{_join(unpaired)} ran on other seeds than the control, so that nothing is paired",
    )
    if not unpaired:
        yield from _shared_starts_and_batches(summary)
    validations = {record.fingerprints["validation"] for record in _records(summary)}
    yield _check(
        "One evaluation set",
        len(validations) == 1,
        f"{summary.control.records[0].num_evaluated:,} targets, fingerprint {min(validations)}",
        f"{len(validations)} different ones: {_join(sorted(validations))}",
    )
    held_out = summary.plan.task.held_out
    if held_out:
        yield Check(name="Held-out data", state="note", detail=f"{held_out}; no training example comes from there")


def _shared_starts_and_batches(summary: Summary) -> Iterator[Check]:
    unequal_weights, unequal_batches = 0, 0
    for block in range(summary.plan.num_seeds):
        records = [variant.records[block] for variant in summary.variants]
        unequal_weights += sum(map(_num_unequal_weights, _by_start(records)))
        unequal_batches += len({record.fingerprints["batches"] for record in records}) > 1
    several = len({_setting(record)[1] for record in _records(summary)}) > 1
    whose = "variants of one `init` have" if several else "variants have"
    yield _check(
        "Shared weights start alike",
        unequal_weights == 0,
        f"every weight that {whose} in common has one start for each seed; wider layers begin like narrower ones",
        f"{unequal_weights} weights differ at the start",
    )
    if len({variant.records[0].tokens for variant in summary.variants}) > 1 or _diverged_counts(summary):
        detail = "batches depend on seed and step alone; runs of different lengths share those that they have in common"
        yield Check(name="The same batches in the same order", state="note", detail=detail)
        return
    yield _check(
        "The same batches in the same order",
        unequal_batches == 0,
        "the fingerprint of all batches is one for each seed",
        f"batches differ under {unequal_batches} of {summary.plan.num_seeds} seeds",
    )


def _by_start(records: Sequence[Record]) -> list[list[Record]]:
    """The records whose weights are drawn alike: of one `init` and, where that looks at inputs, of one width."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        start = start_of(record)
        width = str(record.run.model.d_ff) if start in ("fan-in", "torch") else ""
        groups.setdefault((start, width), []).append(record)
    return list(groups.values())


def _num_unequal_weights(records: Sequence[Record]) -> int:
    fingerprints = [record.fingerprints for record in records]
    names = {name for own in fingerprints for name in own if name.startswith("weights:")}
    return sum(len({own[name] for own in fingerprints if name in own}) > 1 for name in names)


def _budgets(summary: Summary) -> Iterator[Check]:
    match = summary.plan.match
    yield _budget(summary.examples.capitalize(), _planned_examples, summary, match == "tokens", 0.0)
    yield _budget("Parameters", lambda r: r.num_parameters, summary, match == "params", _PARAMETER_SHARE)
    yield _budget("Training FLOPs", _planned_flops, summary, match == "flops", _FLOPS_SHARE)
    if match == "time":
        detail = (
            "steps were set from a measurement of speed before the runs, which no second measurement repeats exactly: "
            "this comparison is the one kind that cannot be reproduced bit by bit"
        )
        yield Check(name="Time", state="note", detail=detail)


def _planned_examples(record: Record) -> float:
    """Number of examples that a run was to see; one that diverged saw fewer."""
    return record.run.training.steps * record.run.training.batch_size


def _planned_flops(record: Record) -> float:
    return _planned_examples(record) * record.flops / record.tokens if record.tokens else 0.0


def _budget(name: str, figure: Callable[[Record], float], summary: Summary, matched: bool, tolerance: float) -> Check:
    control = figure(summary.control.longest)
    if not control:
        return Check(name=name, state="note", detail="the control diverged at its first step: nothing to compare with")
    shares = {v.name: figure(v.longest) / control - 1 for v in summary.variants if v.name != summary.plan.control}
    widest = max(shares.values(), key=abs, default=0.0)
    words = ", ".join(f"{variant} {share:+.2%}" for variant, share in shares.items() if share) or "equal for all"
    if not matched:
        return Check(name=f"{name} (not matched)", state="note", detail=f"over the control: {words}")
    return _check(f"{name} matched", abs(widest) <= tolerance, words, f"over the control: {words}")


def _trained_enough(summary: Summary) -> Iterator[Check]:
    diverged = _diverged_counts(summary)
    words = ", ".join(f"{name} {number} of {summary.plan.num_seeds}" for name, number in diverged.items())
    yield Check(
        name="Runs that diverged",
        state="warning" if diverged else "holds",
        detail=f"{words}: a result like any other, and the mean of the rest says little" if diverged else "no run",
    )
    control = summary.control
    if not control.finished:
        return
    loss, chance = fmean(_losses(control)), summary.plan.task.chance_loss
    # Where a single answer is possible, a blind guess is right.
    if chance > 0:
        detail = f"the control's loss {loss:.3f} is {loss / chance:.0%} of that of a blind guess, {chance:.3f}"
        yield _check("Better than guessing", loss < 0.9 * chance, detail, f"{detail}: under-trained")
    yield _plateau(control, summary.plan.margin)
    yield from _amounts(summary)


def late_gain(control: VariantSummary) -> float | None:
    """The share by which the loss fell in the last fifth of the training; None if too few evaluations tell."""
    gains = [gain for record in control.finished if (gain := _late_gain(record)) is not None]
    return fmean(gains) if gains else None


def _late_gain(record: Record) -> float | None:
    """Of one run; the loss at the beginning of the last fifth is read off between the evaluations around it."""
    curve = [(point.tokens / record.tokens, point.loss) for point in record.curve if point.loss is not None]
    if len(curve) < _EVALUATIONS_THAT_TELL:
        return None
    shares, losses = zip(*curve, strict=True)
    before = float(np.interp(_LATE, shares, losses))
    return 1 - curve[-1][1] / before if before else None


def _plateau(control: VariantSummary, margin: float) -> Check:
    """Check that the loss fell by less than the margin in the last fifth of the training."""
    name, gain = "Trained to a plateau", late_gain(control)
    if gain is None:
        return Check(name=name, state="note", detail="the last fifth of the training has too few evaluations to tell")
    detail = f"in the last fifth of its training the control's loss still fell by {gain:.1%}"
    if gain < margin:
        return Check(name=name, state="holds", detail=f"{detail}, less than the margin")
    advice = "verdicts hold at this budget, and what differs now may not differ later"
    if gain > _LATE_GAIN:
        return Check(name=name, state="violated", detail=f"{detail}: under-trained; {advice}")
    return Check(name=name, state="warning", detail=f"{detail}, more than the margin of {margin:.1%}: {advice}")


def _amounts(summary: Summary) -> Iterator[Check]:
    record = summary.control.longest
    if summary.examples == "tokens":
        ratio = record.tokens / record.num_parameters
        yield Check(
            name="Tokens for each parameter",
            state="holds" if ratio >= TOKENS_PER_PARAMETER else "violated",
            detail=f"{ratio:.1f}" + ("" if ratio >= TOKENS_PER_PARAMETER else ": under-trained, train for longer"),
        )
    if available := summary.plan.task.num_training_examples:
        epochs = record.tokens / available
        yield Check(
            name="Passes over the data",
            state="holds" if epochs <= _EPOCHS else "warning",
            detail=f"{epochs:.2f}" + ("" if epochs <= _EPOCHS else ": the models may learn it by heart"),
        )


def _settings(summary: Summary) -> Iterator[Check]:
    own = {plan.name: plan.overrides for plan in summary.plan.variants if plan.overrides}
    for name, overrides in own.items():
        words = ", ".join(f"{option} = {spell_value(value)}" for option, value in overrides.items())
        yield Check(
            name=f"Options of {name}'s own", state="warning", detail=f"{words}: asked for, and not equal to all"
        )
    yield _tuning(summary)
    training = summary.control.records[0].run.training
    detail = f"an optimiser group of their own: learning rate times {training.gate_lr:g}, no weight decay"
    yield Check(name="Gates' parameters", state="note", detail=detail)
    places = {tuple(sorted(record.environment.items())) for record in _records(summary)}
    yield _check(
        "One machine, one set of versions", len(places) == 1, "for all runs", f"{len(places)} different ones, see below"
    )


def _tuning(summary: Summary) -> Check:
    """What each variant was trained with, and whether the grid that it was chosen from is wide enough."""
    chosen = {variant.name: Counter(map(_setting, variant.records)) for variant in summary.variants}
    words = "; ".join(f"{name} {_listed(settings)}" for name, settings in chosen.items())
    if summary.plan.settings:
        return Check(name="Tuned before", state="note", detail=f"{summary.plan.settings}: {words}")
    if not summary.plan.is_tuned:
        detail = f"{words}; --tune gives each variant its best of one grid"
        return Check(name="Not tuned", state="note", detail=detail)
    tried = [rate_of(record) for record in summary.tuning]
    ends = {name: count for name, settings in chosen.items() if (count := _num_at_end(settings, tried))}
    counts = _join(f"{name} in {count} of {summary.plan.num_seeds} blocks" for name, count in ends.items())
    advice = f". At an end of the rates, so that a better one may lie beyond: {counts}" if ends else ""
    detail = f"one grid for all, inside each block, on seeds of its own. Blocks by what was chosen: {words}{advice}"
    return Check(name="Tuned alike", state="warning" if ends else "holds", detail=detail)


def _setting(record: Record) -> tuple[float, str]:
    """Learning rate and start."""
    return rate_of(record), start_of(record)


def _listed(settings: Counter[tuple[float, str]]) -> str:
    several = len(settings) > 1
    parts = (f"lr {lr:g}, init {init}" + f" ({count})" * several for (lr, init), count in settings.most_common())
    return ", ".join(parts)


def _num_at_end(settings: Counter[tuple[float, str]], rates: Sequence[float]) -> int:
    """How many of a variant's blocks chose the lowest or the highest of several rates."""
    if len(set(rates)) < 2:
        return 0
    return sum(count for (lr, _), count in settings.items() if lr in (min(rates), max(rates)))


def _check(name: str, holds: bool, good: str, bad: str) -> Check:
    return Check(name=name, state="holds" if holds else "violated", detail=good if holds else bad)


def _records(summary: Summary) -> list[Record]:
    return [record for variant in summary.variants for record in variant.records]


def _losses(variant: VariantSummary) -> list[float]:
    return [record.loss for record in variant.finished if record.loss is not None]


def _diverged_counts(summary: Summary) -> dict[str, int]:
    counts = {variant.name: len(variant.records) - len(variant.finished) for variant in summary.variants}
    return {name: count for name, count in counts.items() if count}


def _join(items: Any) -> str:
    return ", ".join(map(str, items))
