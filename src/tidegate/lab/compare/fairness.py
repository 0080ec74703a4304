"""The fairness checks of a comparison: the conditions that must be equal, checked against the records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

import numpy as np

from tidegate.lab.compare.summary import Summary, VariantSummary
from tidegate.lab.compare.tuning import rate_of, spell_value, start_of
from tidegate.lab.training.records import Record
from tidegate.report.page import Check

_PARAMETER_SHARE = 0.001
_FLOPS_SHARE = 0.01
_LATE = 0.8
"""Share of the training after which the late gain is measured."""
_LATE_GAIN = 0.05
_MIN_EVALUATIONS = 5
"""With fewer evaluations, none lies in the fourth fifth of the training."""
TOKENS_PER_PARAMETER = 5
"""Below this, models are under-trained."""
_EPOCHS = 4


def fairness_checks(summary: Summary) -> tuple[Check, ...]:
    """Check every condition of a fair comparison against the records."""
    return (*_equal_conditions(summary), *_budgets(summary), *_trained_enough(summary), *_settings(summary))


def violations_in_words(checks: Sequence[Check]) -> tuple[str, ...]:
    """Return one sentence on the violated conditions; empty if all hold."""
    violated = [check for check in checks if check.state == "violated"]
    if not violated:
        return ()
    words = "; ".join(f"{check.name} ({check.detail})" for check in violated)
    num_checks = sum(check.state != "note" for check in checks)
    are = "is" if len(violated) == 1 else "are"
    return (f"{len(violated)} of {num_checks} fairness checks {are} violated: {words}.",)


def _equal_conditions(summary: Summary) -> Iterator[Check]:
    seeds = [record.run.seed for record in summary.control.records]
    unpaired = [v.name for v in summary.variants if [record.run.seed for record in v.records] != seeds]
    names = ", ".join(unpaired)
    yield _check("Same seeds", not unpaired, ", ".join(map(str, seeds)), f"{names} used other seeds than the baseline")
    if not unpaired:
        yield _same_weights(summary)
        yield _same_batches(summary)
    found = {record.fingerprints["validation"] for record in _records(summary)}
    evaluated = f"{summary.control.records[0].num_evaluated:,} targets, fingerprint {min(found)}"
    yield _check("Same evaluation set", len(found) == 1, evaluated, f"{len(found)} different sets")


def _same_weights(summary: Summary) -> Check:
    """Check the initial weights that variants share, among those with the same initialization."""
    num_unequal = 0
    for block in range(summary.plan.num_seeds):
        values: dict[tuple[str, ...], set[str]] = {}
        for record in (variant.records[block] for variant in summary.variants):
            start = start_of(record)
            # These initializations depend on the number of inputs.
            width = str(record.run.model.d_ff) if start in ("fan-in", "torch") else ""
            for name, value in record.fingerprints.items():
                if name.startswith("weights:"):
                    values.setdefault((start, width, name), set()).add(value)
        num_unequal += sum(len(own) > 1 for own in values.values())
    detail = "all weights shared by variants with the same `init`, for each seed; wider layers contain narrower ones"
    return _check("Same initial weights", not num_unequal, detail, f"{num_unequal} shared weights differ")


def _same_batches(summary: Summary) -> Check:
    name = "Same batches in the same order"
    if len({record.tokens for record in _records(summary)}) > 1:
        return Check(name=name, state="note", detail="runs of different lengths share the batches of the shorter run")
    blocks = zip(*(variant.records for variant in summary.variants), strict=True)
    num_unequal = sum(len({record.fingerprints["batches"] for record in block}) > 1 for block in blocks)
    bad = f"batches differ for {num_unequal} of {summary.plan.num_seeds} seeds"
    return _check(name, not num_unequal, "equal fingerprints of all batches, for each seed", bad)


def _budgets(summary: Summary) -> Iterator[Check]:
    match = summary.plan.match
    yield _budget(summary.examples.capitalize(), _planned_examples, summary, match == "tokens", 0.0)
    yield _budget("Parameters", lambda r: r.num_parameters, summary, match == "params", _PARAMETER_SHARE)
    yield _budget("Training FLOPs", _planned_flops, summary, match == "flops", _FLOPS_SHARE)
    if match == "time":
        detail = "the number of steps follows from speeds measured before the runs, which are not exactly reproducible"
        yield Check(name="Time", state="note", detail=detail)


def _planned_examples(record: Record) -> float:
    """Return the planned number of examples of a run; a diverged run saw fewer."""
    return record.run.training.steps * record.run.training.batch_size


def _planned_flops(record: Record) -> float:
    return _planned_examples(record) * record.flops / record.tokens if record.tokens else 0.0


def _budget(name: str, amount: Callable[[Record], float], summary: Summary, matched: bool, tolerance: float) -> Check:
    control = amount(summary.control.longest)
    if not control:
        return Check(name=name, state="note", detail="not comparable: the baseline diverged at its first step")
    shares = {v.name: amount(v.longest) / control - 1 for v in summary.variants if v.name != summary.plan.control}
    widest = max(shares.values(), key=abs, default=0.0)
    words = ", ".join(f"{variant} {share:+.2%}" for variant, share in shares.items() if share) or "equal for all"
    if not matched:
        return Check(name=f"{name} (not matched)", state="note", detail=f"relative to the baseline: {words}")
    return _check(f"{name} matched", abs(widest) <= tolerance, words, f"relative to the baseline: {words}")


def _trained_enough(summary: Summary) -> Iterator[Check]:
    counts = {variant.name: len(variant.records) - len(variant.finished) for variant in summary.variants}
    diverged = ", ".join(f"{name} {count} of {summary.plan.num_seeds}" for name, count in counts.items() if count)
    if diverged:
        yield Check(name="Diverged runs", state="warning", detail=diverged)
    else:
        yield Check(name="No run diverged", state="holds", detail=f"all {len(_records(summary))} runs finished")
    control = summary.control
    if not control.finished:
        return
    loss, chance = fmean(r.loss for r in control.finished if r.loss is not None), summary.plan.task.chance_loss
    # With a single possible answer, chance has no loss.
    if chance > 0:
        detail = f"the baseline's loss, {loss:.3f}, is {loss / chance:.0%} of the loss at chance, {chance:.3f}"
        yield _check("Better than chance", loss < 0.9 * chance, detail, f"{detail}: under-trained")
    yield _plateau(control, summary.plan.margin)
    record = control.longest
    if summary.examples == "tokens":
        ratio = record.tokens / record.num_parameters
        name, bad = "Tokens per parameter", f"{ratio:.1f}: under-trained, train longer"
        yield _check(name, ratio >= TOKENS_PER_PARAMETER, f"{ratio:.1f}", bad)
    if available := summary.plan.task.num_training_examples:
        epochs = record.tokens / available
        state = "holds" if epochs <= _EPOCHS else "warning"
        yield Check(name="Epochs", state=state, detail=f"{epochs:.2f}" + ": overfitting is likely" * (epochs > _EPOCHS))


def late_gain(control: VariantSummary) -> float | None:
    """Return the share by which the loss fell in the last fifth of training; None with too few evaluations."""
    gains = [gain for record in control.finished if (gain := _late_gain(record)) is not None]
    return fmean(gains) if gains else None


def _late_gain(record: Record) -> float | None:
    curve = [(point.tokens / record.tokens, point.loss) for point in record.curve if point.loss is not None]
    if len(curve) < _MIN_EVALUATIONS:
        return None
    shares, losses = zip(*curve, strict=True)
    before = float(np.interp(_LATE, shares, losses))
    return 1 - curve[-1][1] / before if before else None


def _plateau(control: VariantSummary, margin: float) -> Check:
    """Check that the loss fell by less than the margin in the last fifth of training."""
    name, gain = "Trained to a plateau", late_gain(control)
    if gain is None:
        return Check(name=name, state="note", detail="too few evaluations in the last fifth of training")
    detail = f"the baseline's loss fell by {gain:.1%} in the last fifth of training"
    if gain < margin:
        return Check(name=name, state="holds", detail=f"{detail}, less than the margin")
    limit = "verdicts hold for this training length only and may differ for longer training"
    if gain > _LATE_GAIN:
        return Check(name=name, state="violated", detail=f"{detail}: under-trained; {limit}")
    return Check(name=name, state="warning", detail=f"{detail}, more than the margin of {margin:.1%}: {limit}")


def _settings(summary: Summary) -> Iterator[Check]:
    own = {
        variant.name: ", ".join(f"{option} = {spell_value(value)}" for option, value in variant.overrides.items())
        for variant in summary.plan.variants
    }
    if len(set(own.values())) == 1:
        own = {"all variants": own[summary.plan.control]}
    for name, options in own.items():
        if options:
            state = "note" if name == "all variants" else "warning"
            yield Check(name=f"Own options of {name}", state=state, detail=options)
    yield _tuning(summary)
    environments = [record.environment for record in _records(summary)]
    found = {name: {own.get(name, "unknown") for own in environments} for names in environments for name in names}
    words = {"source": "Tidegate's code, by hash"}
    several = [f"{words.get(k, k)}: {', '.join(sorted(values))}" for k, values in found.items() if len(values) > 1]
    yield _check("Same machine and versions", not several, "for all runs", f"the runs differ in {'; '.join(several)}")


def _tuning(summary: Summary) -> Check:
    """List the settings of each variant, and check that no selected rate lies at an end of the grid."""
    chosen = {v.name: Counter((rate_of(record), start_of(record)) for record in v.records) for v in summary.variants}
    names: dict[str, list[str]] = {}
    for name, settings in chosen.items():
        names.setdefault(_listed(settings), []).append(name)
    words = "; ".join(f"{', '.join(own)}: {listed}" for listed, own in names.items())
    if summary.plan.settings:
        return Check(name="Tuned earlier", state="note", detail=f"{summary.plan.settings}. {words}")
    if not summary.plan.is_tuned:
        detail = f"{words}; --tune selects the best setting for each variant"
        return Check(name="Not tuned", state="note", detail=detail)
    tried = {rate_of(record) for record in summary.tuning}
    ends = {min(tried), max(tried)} if len(tried) > 1 else set[float]()
    at_end = {name: sum(n for (lr, _), n in settings.items() if lr in ends) for name, settings in chosen.items()}
    counts = ", ".join(f"{name} in {n} of {summary.plan.num_seeds} seeds" for name, n in at_end.items() if n)
    advice = f". At an end of the grid, so a better rate may lie outside: {counts}" if counts else ""
    detail = f"the same grid for all, searched for each seed on another seed. Selected for {words}{advice}"
    return Check(name="Tuned on the same grid", state="warning" if counts else "holds", detail=detail)


def _listed(settings: Counter[tuple[float, str]]) -> str:
    several = len(settings) > 1
    parts = (f"lr {lr:g}, init {init}" + f" ({count})" * several for (lr, init), count in settings.most_common())
    return ", ".join(parts)


def _check(name: str, holds: bool, good: str, bad: str) -> Check:
    return Check(name=name, state="holds" if holds else "violated", detail=good if holds else bad)


def _records(summary: Summary) -> list[Record]:
    return [record for variant in summary.variants for record in variant.records]
