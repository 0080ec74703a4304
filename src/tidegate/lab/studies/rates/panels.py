"""Slopes, errors, flat directions and the modulus of the study of rates, as panels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tidegate.lab.studies.rates.result import Curve, GaugeCount, PositionRates, RatesResult
from tidegate.report.page import Column, Estimate, Intervals, Lines, Series, Table

_ZERO = 1e-12


def slope_intervals(result: RatesResult) -> Intervals:
    """The slopes of the expert error, around the line of no progress at all."""
    items = tuple(
        Estimate(
            label=found.position,
            value=slope.slope,
            low=slope.low,
            high=slope.high,
            verdict="control" if found.position == "none" else None,
            sentence=slope.verdict,
        )
        for found in result.rates
        for slope in [found.slopes["expert"]]
    )
    words = "; ".join(f"{item.label} {item.value:.2f}, {item.sentence}" for item in items)
    return Intervals(
        title="At zero more data do not help; at −1/2 four times the data halve the error",
        alternative=f"Slope of the expert error by position of the gate: {words}.",
        x_label="slope of log expert error in log n, 95 % interval",
        items=items,
    )


def slope_table(result: RatesResult) -> Table:
    """Slopes with their intervals and verdicts, of the expert error and of the regression error beside it."""
    columns = (
        Column(title="position of the gate"),
        Column(title="verdict on the experts"),
        Column(title="expert error: slope", digits=3, signed=True),
        Column(title="from", digits=3, signed=True, help="Lower end of the 95 % interval."),
        Column(title="to", digits=3, signed=True, help="Upper end of the 95 % interval."),
        Column(title="regression error: slope", digits=3, signed=True),
        Column(title="from ", digits=3, signed=True),
        Column(title="to ", digits=3, signed=True),
        Column(title="score error: slope", digits=3, signed=True),
        Column(title="converged", unit="%", digits=0, help="Of the fits, at the size where it is least."),
        Column(title="spread of starts", help="Over the error, at the largest n: how far equal fits differ."),
    )
    return Table(
        title="How errors fall with the sample size",
        columns=columns,
        rows=tuple(_slope_row(found) for found in result.rates),
        note="Slopes of medians on logarithmic axes over n of 1000 and more; intervals by bootstrap over replicates.",
    )


def _slope_row(found: PositionRates) -> tuple[float | str | None, ...]:
    expert, regression, scores = (found.slopes[metric] for metric in ("expert", "regression", "scores"))
    return (
        found.position,
        expert.verdict,
        expert.slope,
        expert.low,
        expert.high,
        regression.slope,
        regression.low,
        regression.high,
        scores.slope,
        100 * expert.converged,
        None if expert.spread_ratio is None else f"{expert.spread_ratio:.1e}",
    )


def error_panels(result: RatesResult) -> tuple[Lines, Lines]:
    """The expert error, and the regression error of the same fits."""
    flat = names(found.position for found in result.rates if found.slopes["expert"].verdict == "not identified")
    falling = names(found.position for found in result.rates if found.slopes["expert"].verdict == "identified")
    seen = [f"stays where it began for {flat}"] if flat else []
    seen += [f"falls for {falling}"] if falling else []
    slopes = [found.slopes["regression"].slope for found in result.rates]
    return (
        _errors(result, "expert", "expert error", f"The expert error {', and '.join(seen) or 'by sample size'}"),
        _errors(
            result,
            "regression",
            "regression error, root mean square",
            f"The regression error of the same fits falls everywhere: slopes {min(slopes):.2f} to {max(slopes):.2f}",
        ),
    )


def _errors(result: RatesResult, metric: str, label: str, title: str) -> Lines:
    ends = "; ".join(
        f"{found.position} {curve.median[0]:.3g} to {curve.median[-1]:.3g}"
        for found in result.rates
        for curve in [found.errors[metric]]
    )
    return Lines(
        title=title,
        alternative=f"{label} against n, medians over replicates with the band of 80 %. First to last n: {ends}.",
        x_label="samples n",
        y_label=label,
        series=tuple(_series(found.position, found.errors[metric]) for found in result.rates),
        log_x=True,
        log_y=True,
    )


def gauge_table_panel(result: RatesResult) -> Table:
    """Flat directions of every gate, theory beside measurement."""
    agreeing = sum(count.agrees for count in result.gauge)
    columns = (
        Column(title="layer"),
        Column(title="gate"),
        Column(title="value block: theory", digits=0),
        Column(title="value block: measured", digits=0),
        Column(title="whole layer: theory", digits=0),
        Column(title="whole layer: measured", digits=0),
        Column(title="parameters", digits=0),
        Column(title="gap", help="Smallest singular value that counts over the largest that does not."),
        Column(title="agree"),
    )
    return Table(
        title=f"Flat directions: theory and measurement agree for {agreeing} of {len(result.gauge)} layers",
        columns=columns,
        rows=tuple(_gauge_row(count) for count in result.gauge),
        note="Random layers of width 6 on random inputs; the rank of the exact Jacobian in float64.",
    )


def _gauge_row(count: GaugeCount) -> tuple[float | str | None, ...]:
    gap = None if count.gap is None else f"{count.gap:.0e}"
    agree = "yes" if count.agrees else "no theory" if count.predicted is None else "no"
    measured = (count.predicted_value_block, count.value_block, count.predicted, count.nullity, count.num_parameters)
    return (count.layout, count.gate, *measured, gap, agree)


def modulus_panels(result: RatesResult) -> tuple[Lines | Table, ...]:
    """What an error of an expert must change: curves where it must, and all exponents."""
    steep = [found for found in result.modulus if found.exponent is not None]
    flat = [found for found in result.modulus if found.exponent is None]
    panels: list[Lines | Table] = []
    if steep:
        largest = max((max(found.values) for found in flat), default=0.0)
        rest = f"; for {names(found.position for found in flat)} it is at most {largest:.0e}" if flat else ""
        words = "; ".join(f"{found.position} r = {found.exponent:.2f}" for found in steep)
        panels.append(
            Lines(
                title=f"Where an expert is identified, the function must change in proportion to its error{rest}",
                alternative=f"Least change of the function by the error of an expert, on logarithmic axes: {words}.",
                x_label="error of one expert",
                y_label="least change of the function, root mean square",
                series=tuple(
                    Series(label=found.position, group=found.position, x=found.radii, y=found.values) for found in steep
                ),
                log_x=True,
                log_y=True,
            )
        )
    rows = tuple(
        (
            found.position,
            f"{max(found.values):.1e}" if max(found.values) < _ZERO else f"{max(found.values):.3f}",
            found.exponent,
            "never" if found.exponent is None else f"n^(−{1 / (2 * found.exponent):.2f})",
        )
        for found in result.modulus
    )
    radius = max((max(found.radii) for found in result.modulus), default=0.0)
    columns = (
        Column(title="position of the gate"),
        Column(title=f"change at an error of {radius:g}"),
        Column(title="exponent r", digits=3),
        Column(title="rate"),
    )
    return (*panels, Table(title="Without noise or samples: the modulus", columns=columns, rows=rows))


def start_panel(result: RatesResult) -> Lines:
    """The expert error by the radius of the starts."""
    ratios = {found.position: found.error.median[-1] / found.error.median[0] for found in result.start_radius}
    moved = names(position for position, ratio in ratios.items() if ratio > 2)
    kept = names(position for position, ratio in ratios.items() if ratio <= 2)
    seen = [f"The error is that of the start for {moved}"] if moved else []
    seen += [f"It does not matter where fits begin for {kept}"] if kept else []
    words = ", ".join(f"{position} ×{ratio:.2f}" for position, ratio in ratios.items())
    radii = result.settings.start_radii
    return Lines(
        title=". ".join(seen),
        alternative=f"Expert error at n = {result.settings.start_n:,} against the radius of the starts. "
        f"From {min(radii):g} to {max(radii):g} it changes by: {words}.",
        x_label="radius of the starts around the truth",
        y_label=f"expert error at n = {result.settings.start_n:,}",
        series=tuple(_series(found.position, found.error) for found in result.start_radius),
        log_x=True,
        log_y=True,
    )


def names(positions: Iterable[str]) -> str:
    """Names in a sentence: `a`, `a and b`, `a, b and c`; empty for none."""
    listed: Sequence[str] = list(positions)
    return " and ".join(filter(None, (", ".join(listed[:-1]), *listed[-1:])))


def _series(position: str, curve: Curve) -> Series:
    return Series(label=position, group=position, x=curve.x, y=curve.median, low=curve.low, high=curve.high)
