"""The results of a comparison as numbers, which the terminal, the page and `results.json` show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tidegate._json import encode
from tidegate._text import number_of
from tidegate._verdict import Effect
from tidegate.gates import Gates
from tidegate.lab.compare.variants import placebos_of
from tidegate.lab.judging import (
    Comparison,
    PlaceboResult,
    VariantResult,
    compare_to_control,
    effect_of,
    effect_sentence,
    judge_placebo,
    mean_and_sd,
)
from tidegate.lab.judging.words import duration
from tidegate.lab.training.records import Cost, LayerMeasurements, Line, Plan, Record, last_costs


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantSummary:
    """One variant: its runs and its results."""

    name: str
    gate: str
    records: tuple[Record, ...]
    """One per seed, in order."""
    result: VariantResult
    cost: Cost | None
    layers: LayerMeasurements
    """Of the trained model of its first record."""
    placebos: tuple[PlaceboResult, ...]
    """Compared with variants that have all of its gate except the mechanism."""
    effect: Effect
    effect_sentence: str
    """The effect of its mechanism in words; empty without a placebo."""

    @property
    def branch_scale(self) -> float | None:
        """Initial factor of the attention branch, see `Gates.branch_scale`."""
        return Gates.parse(self.gate).branch_scale

    @property
    def num_parameters(self) -> int:
        """Number of trainable parameters."""
        return self.records[0].num_parameters

    @property
    def longest(self) -> Record:
        """The longest run: diverged runs stop early."""
        return max(self.records, key=lambda record: record.tokens)

    @property
    def finished(self) -> tuple[Record, ...]:
        """The runs that did not diverge."""
        return tuple(record for record in self.records if record.status == "finished")

    def metric(self, name: str) -> tuple[float, float | None] | None:
        """Return mean and standard deviation of a metric that the task reports besides the loss; None without it."""
        values = [record.metrics[name] for record in self.finished if name in record.metrics]
        return mean_and_sd(values) if values else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The results of a whole comparison."""

    plan: Plan
    comparison: Comparison
    variants: tuple[VariantSummary, ...]
    """In the order of the plan, the baseline first."""
    tuning: tuple[Record, ...]
    """The tuning runs."""

    @property
    def control(self) -> VariantSummary:
        """The baseline."""
        return next(variant for variant in self.variants if variant.name == self.plan.control)

    @property
    def metric(self) -> str | None:
        """Name of the metric that the task reports besides the loss."""
        return next((name for variant in self.variants for record in variant.finished for name in record.metrics), None)

    @property
    def examples(self) -> str:
        """Unit of the training examples: tokens or images."""
        return "images" if self.plan.task.kind == "image" else "tokens"

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers as plain JSON values: `results.json`."""
        return {
            "plan": encode(self.plan),
            "comparison": asdict(self.comparison),
            "variants": [
                {
                    "name": variant.name,
                    "gate": variant.gate,
                    "num_parameters": variant.num_parameters,
                    "num_gate_parameters": variant.records[0].num_gate_parameters,
                    "training_flops": variant.longest.flops,
                    "tokens": variant.longest.tokens,
                    "losses": [record.loss for record in variant.records],
                    "branch_scale": variant.branch_scale,
                    "placebos": [asdict(placebo) for placebo in variant.placebos],
                    "effect": variant.effect,
                    "effect_sentence": variant.effect_sentence,
                    **{name: found[0] for name in (self.metric,) if name and (found := variant.metric(name))},
                    "cost": None if variant.cost is None else asdict(variant.cost),
                }
                for variant in self.variants
            ],
            "records": [encode(record) for variant in self.variants for record in variant.records],
            "layers": [asdict(variant.layers) for variant in self.variants],
            "tuning": [encode(record) for record in self.tuning],
        }


def summarise(lines: Sequence[Line]) -> Summary:
    """Return the results of a comparison from its records.

    Raises:
        ValueError: The records are incomplete, or not of a comparison.
    """
    plan = next((line for line in lines if isinstance(line, Plan)), None)
    if plan is None:
        raise ValueError(
            "The records have no plan: they are not of a comparison, or its line was removed. Rerun the command of the "
            "comparison to write it again."
        )
    if plan.control not in (variant.name for variant in plan.variants):
        raise ValueError(f"The plan names {plan.control!r} as its control, but has no such variant.")
    runs = {line.id: line for line in lines if isinstance(line, Record) and line.status != "failed"}.values()
    compared = sorted((r for r in runs if r.run.role == "comparison"), key=lambda record: record.run.block)
    records = {v.name: tuple(r for r in compared if r.run.variant == v.name) for v in plan.variants}
    missing = {name: plan.num_seeds - len(own) for name, own in records.items() if len(own) != plan.num_seeds}
    if missing:
        words = ", ".join(f"{name} lacks {number_of(number, 'run')}" for name, number in missing.items())
        raise ValueError(f"The comparison is not complete: {words}. Resume it with: {plan.command or 'compare(...)'}")
    losses = {name: [record.loss for record in own] for name, own in records.items()}
    comparison = compare_to_control(
        losses,
        control=plan.control,
        margin=plan.margin,
        identical=[name for name, own in records.items() if name != plan.control and _same(own, records[plan.control])],
        unit="nats",
        time_of=_time_of(plan, list(runs)),
    )
    placebos = compare_with_placebos(plan, losses, comparison)
    layers = {line.id: line for line in lines if isinstance(line, LayerMeasurements)}
    measured = last_costs(lines)
    costs = {cost.variant: cost for cost in measured.items} if measured is not None else {}
    variants: list[VariantSummary] = []
    for variant in plan.variants:
        result, own, first = comparison[variant.name], placebos[variant.name], records[variant.name][0]
        effect = effect_of(result, own)
        variants.append(
            VariantSummary(
                name=variant.name,
                gate=variant.gate,
                records=records[variant.name],
                result=result,
                cost=costs.get(variant.name),
                layers=layers.get(first.id) or _no_layers(first),
                placebos=own,
                effect=effect,
                effect_sentence=effect_sentence(result, own, effect, comparison),
            )
        )
    tuning = sorted((r for r in runs if r.run.role == "tuning"), key=lambda r: r.id)
    return Summary(plan=plan, comparison=comparison, variants=tuple(variants), tuning=tuple(tuning))


def compare_with_placebos(
    plan: Plan, losses: Mapping[str, Sequence[float | None]], comparison: Comparison
) -> dict[str, tuple[PlaceboResult, ...]]:
    """Compare each variant with its placebos, from the losses of all variants."""
    return {
        variant.name: tuple(
            judge_placebo(losses[variant.name], losses[name], name=name, confidence=comparison.confidence)
            for name in placebos_of(variant, plan.variants, control=plan.control)
        )
        for variant in plan.variants
    }


def _time_of(plan: Plan, runs: Sequence[Record]) -> Callable[[int], str]:
    """Return a function of a number of seeds: the time that their training takes on the recorded machine, in words."""
    recorded = plan.environment.get("cores", "")
    cores = int(recorded) if recorded.isdecimal() else 0
    timings = [(run.timing.seconds, run.run.training) for run in runs if run.timing is not None]
    core_seconds = sum(seconds[-1] * training.num_threads for seconds, training in timings if seconds)
    is_known = cores and core_seconds and all(training.device == "cpu" for _, training in timings)

    def words(num_seeds: int) -> str:
        if not is_known:
            return ""
        time = duration(core_seconds / cores * num_seeds / plan.num_seeds)
        return f"{time} of training on {number_of(cores, 'core')}"

    return words


def _no_layers(record: Record) -> LayerMeasurements:
    reason = "its first run diverged" if record.status == "diverged" else "there is no measurement on record"
    return LayerMeasurements(id=record.id, curvature_reason=reason, gauge_reason=reason)


def _same(records: tuple[Record, ...], others: tuple[Record, ...]) -> bool:
    """Return whether the runs differ only in their names."""
    pairs = zip(records, others, strict=True)
    return all(replace(own.run, variant="") == replace(other.run, variant="") for own, other in pairs)
