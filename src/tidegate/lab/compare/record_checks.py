"""What is asked of a comparison's records before they are judged and drawn, where their types do not promise it.

Each line of a file may be whole, and together they may still be what no comparison wrote.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, cast

from tidegate._json import encode
from tidegate._text import short_repr
from tidegate.lab.training.measurements import QUANTILES
from tidegate.lab.training.records import Costs, LayerMeasurements, ObservationSummary, Plan, Record

_LARGEST = 1e100
"""Squares and sums of such numbers are still finite; no figure of a training comes near."""
_GATE_FIGURES = {"mean", "below", "spread"}


def require_records_of_a_comparison(
    plan: Plan, runs: Iterable[Record], layers: Iterable[LayerMeasurements], costs: Costs | None
) -> None:
    """Refuse lines that no comparison leaves behind; the `ValueError` names the line and the field.

    runs : those that finished or diverged
    """
    try:
        require_plan(plan)
        sites: dict[str, set[str]] = {}
        for record in runs:
            where = f"run {short_repr(record.id)}"
            _require_record(record, plan, where)
            for seen in record.observations:
                expected = sites.setdefault(record.run.variant, set(seen.gates))
                _require(set(seen.gates) == expected, f"{where}: gates", f"at {sorted(expected)}", sorted(seen.gates))
        for measured in layers:
            _require_layers(measured, where=f"layers of {short_repr(measured.id)}")
        if costs is not None:
            _require_moderate(asdict(costs), "costs")
    except ValueError as problem:
        raise ValueError(
            f"These are not the records of one comparison: {problem} Take the file that `tidegate compare` wrote, or "
            "run that command again."
        ) from None


def require_plan(plan: Plan) -> None:
    """Refuse a plan that no page can be made of, such as one of a task whose facts are not complete."""
    _require(plan.num_seeds >= 1, "plan.num_seeds", "at least 1", plan.num_seeds)
    _require_moderate(plan.task.to_dict(), "plan.task")


def _require_record(record: Record, plan: Plan, where: str) -> None:
    for name in ("batches", "validation"):
        _require(name in record.fingerprints, f"{where}: fingerprints.{name}", "given", None)
    _require_moderate(encode(record), where)
    _require(record.num_parameters >= 1, f"{where}: num_parameters", "at least 1", record.num_parameters)
    if record.status == "finished":
        _require(record.loss is not None, f"{where}: loss", "a number in a run that finished", record.loss)
        _require(record.tokens >= 1, f"{where}: tokens", "at least 1 in a run that finished", record.tokens)
    if record.loss_by_position:
        _require(plan.task.kind != "image", f"{where}: loss_by_position", "empty for images", "positions")
        length = plan.task.length
        _require(length is not None and length >= 1, "plan.task.length", "a whole number of at least 1", length)
    for index, seen in enumerate(record.observations):
        _require_observation(seen, f"{where}: observations[{index}]")


def _require_observation(seen: ObservationSummary, where: str) -> None:
    for name in ("largest_activation", "effective_rank"):
        _require(getattr(seen, name), f"{where}.{name}", "a number for each layer", getattr(seen, name))
    for site, figures in seen.gates.items():
        _require(set(figures) == _GATE_FIGURES, f"{where}.gates.{site}", "mean, below and spread", sorted(figures))


def _require_layers(measured: LayerMeasurements, where: str) -> None:
    _require_moderate(asdict(measured), where)
    for layer in measured.curvature.layers if measured.curvature is not None else ():
        right = len(layer.quantiles) == len(QUANTILES)
        _require(right, f"{where}: curvature.quantiles", f"a list of {len(QUANTILES)}", layer.quantiles)
    for layer in measured.gauge:
        right = layer.free and layer.singular_values and all(layer.singular_values)
        _require(right, f"{where}: gauge", "numbers for each head", [layer.free, layer.singular_values])


def _require_moderate(value: Any, where: str) -> None:
    """Refuse a number, however deep inside, that no sum or square of it could be taken of."""
    if isinstance(value, dict):
        for name, item in cast("dict[str, Any]", value).items():
            _require_moderate(item, f"{where}.{name}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(cast("list[Any]", value)):
            _require_moderate(item, f"{where}[{index}]")
    elif isinstance(value, int | float):
        _require(abs(value) <= _LARGEST, where, f"at most {_LARGEST:g} in size", value)


def _require(holds: object, where: str, expected: str, got: object) -> None:
    if not holds:
        raise ValueError(f"{where} must be {expected}; got {short_repr(got)}.")
