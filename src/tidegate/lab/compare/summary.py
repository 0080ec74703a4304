"""What a comparison found, in numbers: the terminal, the page and `results.json` all read these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tidegate._json import encode
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
from tidegate.lab.training.records import Cost, LayerMeasurements, Line, Plan, Record, Variant, last_costs


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantSummary:
    """One variant: its runs, and what they say."""

    name: str
    gate: str
    records: tuple[Record, ...]
    """One a block, in the order of the blocks."""
    result: VariantResult
    cost: Cost | None
    layers: LayerMeasurements
    """Of the trained model of its first record."""
    placebos: tuple[PlaceboResult, ...]
    """Against what has all of its gate but the mechanism."""
    effect: Effect
    effect_sentence: str
    """What that says of its gate; empty for what has no placebo."""

    @property
    def branch_scale(self) -> float | None:
        """What the gate multiplies the attention branch by at the start, see `Gates.branch_scale`."""
        return Gates.parse(self.gate).branch_scale

    @property
    def num_parameters(self) -> int:
        """How many numbers it learns."""
        return self.records[0].num_parameters

    @property
    def longest(self) -> Record:
        """The run that went farthest: one that diverged stopped early."""
        return max(self.records, key=lambda record: record.tokens)

    @property
    def finished(self) -> tuple[Record, ...]:
        """The runs that ended in a number."""
        return tuple(record for record in self.records if record.status == "finished")

    def metric(self, name: str) -> tuple[float, float | None] | None:
        """Mean and standard deviation of what the task reports besides the loss; None where it does not."""
        values = [record.metrics[name] for record in self.finished if name in record.metrics]
        return mean_and_sd(values) if values else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A whole comparison."""

    plan: Plan
    comparison: Comparison
    variants: tuple[VariantSummary, ...]
    """In the order of the plan, the control first."""
    tuning: tuple[Record, ...]
    """The runs that chose learning rates."""

    @property
    def control(self) -> VariantSummary:
        """What the others are compared with."""
        return next(variant for variant in self.variants if variant.name == self.plan.control)

    @property
    def metric(self) -> str | None:
        """The name of what the task reports besides the loss."""
        return next((name for variant in self.variants for record in variant.finished for name in record.metrics), None)

    @property
    def examples(self) -> str:
        """What is counted as seen: tokens, or images."""
        return "images" if self.plan.task.kind == "image" else "tokens"

    def to_dict(self) -> dict[str, Any]:
        """All numbers as plain JSON values: `results.json`."""
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
    """Judge what the records hold.

    A `ValueError` says what is missing if the comparison is not complete, and what is wrong with records that no
    comparison wrote.
    """
    plan = next((line for line in lines if isinstance(line, Plan)), None)
    if plan is None:
        raise ValueError(
            "There is no plan among these records: they are not of a comparison, or its line was removed. The command "
            "of the comparison writes it anew."
        )
    if plan.control not in (variant.name for variant in plan.variants):
        raise ValueError(f"The plan of these records has no variant {plan.control!r}, which it names as its control.")
    runs = {line.id: line for line in lines if isinstance(line, Record) and line.status != "failed"}.values()
    compared = sorted((r for r in runs if r.run.role == "comparison"), key=lambda record: record.run.block)
    records = {v.name: tuple(r for r in compared if r.run.variant == v.name) for v in plan.variants}
    _require_complete(plan, records)
    layers = {line.id: line for line in lines if isinstance(line, LayerMeasurements)}
    measured = last_costs(lines)
    comparison = compare_to_control(
        {name: [record.loss for record in own] for name, own in records.items()},
        control=plan.control,
        margin=plan.margin,
        identical=[name for name, own in records.items() if name != plan.control and _same(own, records[plan.control])],
        unit="nats",
    )
    costs = {cost.variant: cost for cost in measured.items} if measured is not None else {}
    return Summary(
        plan=plan,
        comparison=comparison,
        variants=tuple(
            VariantSummary(
                name=variant.name,
                gate=variant.gate,
                records=records[variant.name],
                result=comparison[variant.name],
                cost=costs.get(variant.name),
                layers=_layers(records[variant.name][0], layers),
                **_effect(variant, plan, records, comparison),
            )
            for variant in plan.variants
        ),
        tuning=tuple(sorted((r for r in runs if r.run.role == "tuning"), key=lambda r: r.id)),
    )


def _effect(
    variant: Variant, plan: Plan, records: Mapping[str, Sequence[Record]], comparison: Comparison
) -> dict[str, Any]:
    """What the placebos say of a variant, under the names that `VariantSummary` has."""
    losses = {name: [record.loss for record in own] for name, own in records.items()}
    placebos = tuple(
        judge_placebo(losses[variant.name], losses[name], name=name, confidence=comparison.confidence)
        for name in placebos_of(variant, plan.variants, control=plan.control)
    )
    result = comparison[variant.name]
    effect = effect_of(result, placebos)
    sentence = effect_sentence(result, placebos, effect, comparison)
    return {"placebos": placebos, "effect": effect, "effect_sentence": sentence}


def _layers(record: Record, measured: Mapping[str, LayerMeasurements]) -> LayerMeasurements:
    if record.id in measured:
        return measured[record.id]
    reason = "its first run diverged" if record.status == "diverged" else "no measurement is on record"
    return LayerMeasurements(id=record.id, curvature_reason=reason, gauge_reason=reason)


def _require_complete(plan: Plan, records: dict[str, tuple[Record, ...]]) -> None:
    missing = {name: plan.num_seeds - len(own) for name, own in records.items() if len(own) != plan.num_seeds}
    if missing:
        words = ", ".join(f"{name} lacks {number}" for name, number in missing.items())
        again = plan.command or "the same command"
        raise ValueError(f"The comparison is not complete: of {plan.num_seeds} runs each, {words}. Go on with: {again}")


def _same(records: tuple[Record, ...], others: tuple[Record, ...]) -> bool:
    """Whether the runs differ in their names alone."""
    pairs = zip(records, others, strict=True)
    return all(replace(own.run, variant="") == replace(other.run, variant="") for own, other in pairs)
