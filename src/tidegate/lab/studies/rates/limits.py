"""The limits that the study of rates found, as panels: near gates, other truths, surplus experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from statistics import median

from tidegate.lab.studies.rates.panels import names
from tidegate.lab.studies.rates.result import NearGates, RatesResult, Slope
from tidegate.report.page import Column, Lines, Panel, Prose, Series, Table

_SLOPE_COLUMNS = (
    Column(title="slope", digits=3, signed=True),
    Column(title="from", digits=3, signed=True),
    Column(title="to", digits=3, signed=True),
    Column(title="converged", unit="%", digits=0, help="Of the fits, at the size where it is least."),
    Column(title="verdict"),
)
_KINDS = {"vector_mass": "sums over each true gate", "scalar_mass": "sums of lengths", "raw": "single experts"}


def near_gates_panels(result: RatesResult) -> Iterator[Panel]:
    """The expert error by the distance of the two true gates; nothing if it was not asked for."""
    if not result.near_gates:
        return
    largest = max(result.settings.ns)
    yield Lines(
        title=_near_title(result),
        alternative=f"Expert error at n = {largest:,} against the distance of the true gates. " + _near_words(result),
        x_label="distance of the two true gates",
        y_label=f"expert error at n = {largest:,}, median",
        series=(*_near_series(result), *_without_gate(result)),
        log_x=True,
        log_y=True,
    )
    columns = (Column(title="position of the gate"), Column(title="distance", digits=2), *_SLOPE_COLUMNS)
    yield Table(
        title="The same experiment with gates that come nearer",
        columns=(*columns, Column(title=f"error at n = {largest:,}", digits=4)),
        rows=tuple((near.position, near.distance, *_cells(near.slope), near.error) for near in result.near_gates),
    )


def truths_table(result: RatesResult) -> Table | None:
    """Slopes over truths and designs that were drawn at random; None without any."""
    if not result.truths:
        return None
    rows: list[tuple[float | str | None, ...]] = []
    for position in result.settings.positions:
        found = [truth.slope for truth in result.truths if truth.position == position]
        verdicts = Counter(slope.verdict for slope in found)
        slopes = [slope.slope for slope in found]
        words = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
        worst = 100 * min(slope.converged for slope in found)
        rows.append((position, len(found), min(slopes), median(slopes), max(slopes), worst, words))
    return Table(
        title="Does it hold for other experts and other sequences?",
        columns=(
            Column(title="position of the gate"),
            Column(title="truths", digits=0),
            Column(title="least slope", digits=3, signed=True),
            Column(title="median slope", digits=3, signed=True),
            Column(title="greatest slope", digits=3, signed=True),
            Column(title="converged", unit="%", digits=0, help="Of the fits, at the worst truth and size."),
            Column(title="verdicts"),
        ),
        rows=tuple(rows),
        note="Truth and design were drawn anew; gates, as they act on the input, at least 1 apart.",
    )


def surplus_table(result: RatesResult) -> Table | None:
    """Slopes where more experts are fitted than there are; None if that was left out."""
    if not result.surplus:
        return None
    return Table(
        title=f"{2 + result.settings.surplus} experts for 2: what is estimated, and whether fits arrive",
        columns=(Column(title="position of the gate"), Column(title="what is compared"), *_SLOPE_COLUMNS),
        rows=tuple((found.position, _KINDS[found.kind], *_cells(found.slope)) for found in result.surplus),
        note="σ(z) + σ(−z) = 1: an expert u at the gate θ equals 2u at 0 and −u at −θ, so fits lie in flat valleys.",
    )


def caution(result: RatesResult) -> Prose:
    """What the page does not say."""
    paragraphs = [
        "The advantage is one of identification, not of prediction: the regression error falls alike everywhere. "
        "“Exponentially many samples” reads as “never” here: on an exact gauge orbit the error is that of the start.",
        "What is not identified is the split of a head into channels; the sum of its experts is, without any gate.",
    ]
    if failed := names(sorted({found.position for found in result.surplus if found.slope.converged < 0.9})):
        paragraphs.append(
            f"With more experts than there are, too few fits converged for {failed}: no verdict is given there, "
            "whatever the slope."
        )
    paragraphs.append(
        "One entry of one head, two experts of width 2. A trained layer has other gates and other inputs."
    )
    return Prose(paragraphs=tuple(paragraphs), caution=True)


def _near_title(result: RatesResult) -> str:
    level = _level_without_gate(result)
    if level is None:
        return "The nearer the gates, the larger the error"
    better = {near.distance for near in result.near_gates if near.error <= level}
    if not (worse := set(result.settings.gate_distances) - better):
        return "The nearer the gates, the larger the error"
    return f"The nearer the gates, the larger the error: at {max(worse):g} larger than without a gate, everywhere"


def _near_words(result: RatesResult) -> str:
    return " ".join(
        f"{position}: " + ", ".join(f"{near.error:.3g} at {near.distance:g}" for near in _of(result, position)) + "."
        for position in result.settings.gated_positions
    )


def _near_series(result: RatesResult) -> Iterator[Series]:
    for position in result.settings.gated_positions:
        found = _of(result, position)
        yield Series(
            label=position,
            group=position,
            x=tuple(near.distance for near in found),
            y=tuple(near.error for near in found),
        )


def _without_gate(result: RatesResult) -> Iterator[Series]:
    level, distances = _level_without_gate(result), result.settings.gate_distances
    if level is not None:
        ends = (min(distances), max(distances))
        yield Series(label="none, for comparison", group="none", x=ends, y=(level, level))


def _level_without_gate(result: RatesResult) -> float | None:
    return next((found.errors["expert"].median[-1] for found in result.rates if found.position == "none"), None)


def _of(result: RatesResult, position: str) -> list[NearGates]:
    return [near for near in result.near_gates if near.position == position]


def _cells(slope: Slope) -> tuple[float | str | None, ...]:
    return (slope.slope, slope.low, slope.high, 100 * slope.converged, slope.verdict)
