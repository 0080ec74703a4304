"""Panels of slopes, errors, flat directions, the modulus and the limits, and the study."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from statistics import median

from tidegate.lab.studies.catalogue import QUESTIONS
from tidegate.lab.studies.rates.run import (
    QUICK,
    ErrorCurve,
    RatesOptions,
    RatesResult,
    Slope,
    finding,
    list_names,
    run_rates,
)
from tidegate.lab.studies.study import Study
from tidegate.report.page import CellValue, Column, Estimate, Intervals, Lines, Panel, Prose, Section, Series, Table

_ZERO = 1e-12
_log_lines = partial(Lines, log_x=True, log_y=True)
_signed = partial(Column, digits=3, signed=True)
_PLACEMENT = Column(title="placement of the gate")
_CONVERGED = Column(title="converged", unit="%", digits=0, help="Share of the fits, at the worst sample size.")
_SLOPE_COLUMNS = (
    *(_signed(title=title) for title in ("slope", "from", "to")),
    _CONVERGED,
    Column(title="verdict"),
)
_KINDS = {"vector_mass": "sums over each true gate", "raw": "single experts"}


def view(result: RatesResult) -> tuple[Section, ...]:
    """Return slopes, errors, flat directions, the modulus and the limits."""
    options = result.options
    return (
        Section(
            title="Slopes and verdicts",
            lead=f"2 experts, {options.replicates} replicates of {options.starts} starts, n up to {max(options.ns):,}.",
            panels=(slope_intervals(result), slope_table(result)),
        ),
        Section(
            title="Expert error and regression error of the same fits",
            lead="Lines are medians over replicates; bands are the central 80 %.",
            panels=error_panels(result),
        ),
        Section(
            title="Flat directions",
            lead="Directions in a layer's parameters along which no output changes; no data can identify them.",
            panels=(gauge_counts(result),),
        ),
        Section(
            title="Modulus of identifiability",
            lead="One expert is fixed away from its true value and everything else is fitted without noise.",
            panels=tuple(modulus_panels(result)),
        ),
        Section(
            title="Dependence on the start",
            lead="Starts are drawn around the truth at a fixed radius; experts that are not identified keep its error.",
            panels=(start_panel(result),),
        ),
        Section(title="Limits", panels=tuple(limit_panels(result))),
    )


def slope_intervals(result: RatesResult) -> Intervals:
    """Return the slopes of the expert error; at 0 more data do not help."""
    items = tuple(
        Estimate(
            label=found.placement,
            value=slope.slope,
            low=slope.low,
            high=slope.high,
            verdict="control" if found.placement == "none" else None,
            sentence=slope.verdict,
        )
        for found in result.rates
        for slope in [found.slopes["expert"]]
    )
    words = "; ".join(f"{item.label} {item.value:.2f}, {item.sentence}" for item in items)
    return Intervals(
        title="Slopes of the expert error: at 0 more data do not help; at −1/2 four times the data halve the error",
        alternative=f"Slope of the expert error by placement of the gate: {words}.",
        x_label="slope of log expert error in log n, 95 % interval",
        items=items,
    )


def slope_table(result: RatesResult) -> Table:
    """Return the slopes and verdicts of the expert error, and the slopes of the other errors."""
    rows: list[tuple[CellValue, ...]] = []
    for found in result.rates:
        expert, regression, scores = (found.slopes[metric] for metric in ("expert", "regression", "scores"))
        spread = None if expert.spread_ratio is None else f"{expert.spread_ratio:.1e}"
        slopes = (*_interval(expert), *_interval(regression), scores.slope)
        rows.append((found.placement, expert.verdict, *slopes, 100 * expert.converged, spread))
    columns = (
        _PLACEMENT,
        Column(title="verdict on the experts"),
        _signed(title="expert error: slope"),
        _signed(title="from", help="Lower end of the 95 % interval."),
        _signed(title="to", help="Upper end of the 95 % interval."),
        *(_signed(title=title) for title in ("regression error: slope", "from ", "to ", "score error: slope")),
        _CONVERGED,
        Column(title="spread of starts", help="Distance between equally good fits over the error, at the largest n."),
    )
    return Table(
        title="Slopes of the errors in the sample size",
        columns=columns,
        rows=tuple(rows),
        note="Slopes of log medians in log n for n of at least 1000; intervals by bootstrap over replicates.",
    )


def slope_summary(result: RatesResult) -> Table:
    """Return the slopes of the expert and regression errors with their intervals, narrow enough for a terminal."""
    titles = ("gate", "experts", "expert slope", "regression slope")
    rows = tuple(
        (
            found.placement,
            expert.verdict,
            *(f"{s.slope:+.3f} ({s.low:+.3f} … {s.high:+.3f})" for s in (expert, found.slopes["regression"])),
        )
        for found in result.rates
        for expert in [found.slopes["expert"]]
    )
    title = "Slopes of the errors in the sample size, with 95 % intervals"
    return Table(title=title, columns=tuple(Column(title=each) for each in titles), rows=rows)


def error_panels(result: RatesResult) -> tuple[Lines, Lines]:
    """Return the expert error, and the regression error of the same fits."""
    flat = list_names(found.placement for found in result.rates if found.slopes["expert"].verdict == "not identified")
    falling = list_names(found.placement for found in result.rates if found.slopes["expert"].verdict == "identified")
    seen = [f"stays at its start for {flat}"] if flat else []
    seen += [f"falls for {falling}"] if falling else []
    slopes = [found.slopes["regression"].slope for found in result.rates]
    return (
        _errors(result, "expert", "expert error", f"The expert error {', and '.join(seen) or 'by sample size'}"),
        _errors(
            result,
            "regression",
            "regression error, root mean square",
            f"The regression error of the same fits falls: slopes {min(slopes):.2f} to {max(slopes):.2f}",
        ),
    )


def _errors(result: RatesResult, metric: str, label: str, title: str) -> Lines:
    curves = {found.placement: found.errors[metric] for found in result.rates}
    ends = "; ".join(f"{name} {curve.median[0]:.3g} to {curve.median[-1]:.3g}" for name, curve in curves.items())
    return _log_lines(
        title=title,
        alternative=f"{label} against n, medians over replicates with the central 80 %. First to last n: {ends}.",
        x_label="samples n",
        y_label=label,
        series=tuple(_series(name, curve) for name, curve in curves.items()),
    )


def gauge_counts(result: RatesResult) -> Table:
    """Return the predicted and measured flat directions of every gate."""
    rows = tuple(
        (
            count.layout,
            count.gate,
            count.predicted_value_block,
            count.value_block,
            count.predicted,
            count.nullity,
            count.num_parameters,
            None if count.gap is None else f"{count.gap:.0e}",
            "yes" if count.agrees else "no theory" if count.predicted is None else "no",
        )
        for count in result.gauge
    )
    numbers = [f"{part}: {by}" for part in ("value block", "whole layer") for by in ("theory", "measured")]
    columns = (
        Column(title="layer"),
        Column(title="gate"),
        *(Column(title=title, digits=0) for title in (*numbers, "parameters")),
        Column(title="gap", help="Smallest nonzero singular value over the largest zero one."),
        Column(title="agree"),
    )
    agreeing = sum(count.agrees for count in result.gauge)
    return Table(
        title=f"Flat directions: theory and measurement agree for {agreeing} of {len(result.gauge)} layers",
        columns=columns,
        rows=rows,
        note="Random layers of width 6 on random inputs; rank of the exact Jacobian in float64.",
    )


def modulus_panels(result: RatesResult) -> Iterator[Panel]:
    """Yield the change of the function by an expert's error as curves if it is not 0, and all exponents."""
    steep = [found for found in result.modulus if found.exponent is not None]
    flat = [found for found in result.modulus if found.exponent is None]
    if steep:
        largest = max((max(found.values) for found in flat), default=0.0)
        rest = (
            f"; for {list_names(found.placement for found in flat)} the change is at most {largest:.0e}" if flat else ""
        )
        words = "; ".join(f"{found.placement} r = {found.exponent:.2f}" for found in steep)
        yield _log_lines(
            title=f"If an expert is identified, the function changes in proportion to its error{rest}",
            alternative=f"Smallest change of the function by the error of an expert, on logarithmic axes: {words}.",
            x_label="error of one expert",
            y_label="smallest change of the function, root mean square",
            series=tuple(
                Series(label=found.placement, group=found.placement, x=found.radii, y=found.values) for found in steep
            ),
        )
    rows = tuple(
        (
            found.placement,
            f"{max(found.values):.1e}" if max(found.values) < _ZERO else f"{max(found.values):.3f}",
            found.exponent,
            "never" if found.exponent is None else f"n^(−{1 / (2 * found.exponent):.2f})",
        )
        for found in result.modulus
    )
    radius = max((max(found.radii) for found in result.modulus), default=0.0)
    columns = (
        _PLACEMENT,
        Column(title=f"change at an error of {radius:g}"),
        Column(title="exponent r", digits=3),
        Column(title="rate"),
    )
    yield Table(title="Modulus, without noise or samples", columns=columns, rows=rows)


def start_panel(result: RatesResult) -> Lines:
    """Return the expert error by the radius of the starts."""
    ratios = {found.placement: found.error.median[-1] / found.error.median[0] for found in result.start_radius}
    moved = list_names(placement for placement, ratio in ratios.items() if ratio > 2)
    kept = list_names(placement for placement, ratio in ratios.items() if ratio <= 2)
    seen = [f"The error is that of the start for {moved}"] if moved else []
    seen += [f"The start does not matter for {kept}"] if kept else []
    words = ", ".join(f"{placement} ×{ratio:.2f}" for placement, ratio in ratios.items())
    radii = result.options.start_radii
    return _log_lines(
        title=". ".join(seen),
        alternative=f"Expert error at n = {result.options.start_n:,} against the radius of the starts. "
        f"Ratio from {min(radii):g} to {max(radii):g}: {words}.",
        x_label="radius of the starts around the truth",
        y_label=f"expert error at n = {result.options.start_n:,}",
        series=tuple(_series(found.placement, found.error) for found in result.start_radius),
    )


def limit_panels(result: RatesResult) -> Iterator[Panel]:
    """Yield near gates, other truths and surplus experts, each unless it was omitted, and a caution."""
    if result.near_gates:
        yield near_gate_lines(result)
        largest = max(result.options.ns)
        yield Table(
            title="Slopes by the distance of the true gates",
            columns=(
                _PLACEMENT,
                Column(title="distance", digits=2),
                *_SLOPE_COLUMNS,
                Column(title=f"error at n = {largest:,}", digits=4),
            ),
            rows=tuple((near.placement, near.distance, *_cells(near.slope), near.error) for near in result.near_gates),
        )
    if result.truths:
        yield truths_table(result)
    if result.surplus:
        yield Table(
            title=f"Surplus experts: {2 + result.options.surplus} fitted for 2 true ones",
            columns=(_PLACEMENT, Column(title="what is compared"), *_SLOPE_COLUMNS),
            rows=tuple((found.placement, _KINDS[found.kind], *_cells(found.slope)) for found in result.surplus),
            note="σ(z) + σ(−z) = 1: an expert u at the gate θ equals 2u at 0 and −u at −θ, "
            "so fits lie in flat valleys.",
        )
    yield caution(result)


def near_gate_lines(result: RatesResult) -> Lines:
    """Return the expert error by the distance of the two true gates, and the error without a gate."""
    distances, largest = result.options.gate_distances, max(result.options.ns)
    level = next((found.errors["expert"].median[-1] for found in result.rates if found.placement == "none"), None)
    series, words = list[Series](), list[str]()
    for placement in result.options.gated_placements:
        found = [near for near in result.near_gates if near.placement == placement]
        x, y = tuple(near.distance for near in found), tuple(near.error for near in found)
        series.append(Series(label=placement, group=placement, x=x, y=y))
        words.append(f"{placement}: {', '.join(f'{near.error:.3g} at {near.distance:g}' for near in found)}.")
    title = "The error grows as the gates approach each other"
    if level is not None:
        ends = (min(distances), max(distances))
        series.append(Series(label="none, for comparison", group="none", x=ends, y=(level, level)))
        if worse := set(distances) - {near.distance for near in result.near_gates if near.error <= level}:
            title += f"; at {max(worse):g} it exceeds that without a gate for all placements"
    return _log_lines(
        title=title,
        alternative=f"Expert error at n = {largest:,} against the distance of the true gates. {' '.join(words)}",
        x_label="distance of the two true gates",
        y_label=f"expert error at n = {largest:,}, median",
        series=tuple(series),
    )


def truths_table(result: RatesResult) -> Table:
    """Return verdicts and slopes over random truths and designs."""
    rows: list[tuple[CellValue, ...]] = []
    for placement in result.options.placements:
        found = [truth.slope for truth in result.truths if truth.placement == placement]
        slopes = [slope.slope for slope in found]
        verdicts = Counter(slope.verdict for slope in found).most_common()
        words = ", ".join(f"{count} {verdict}" for verdict, count in verdicts)
        worst = 100 * min(slope.converged for slope in found)
        rows.append((placement, len(found), min(slopes), median(slopes), max(slopes), worst, words))
    return Table(
        title="Other random experts and sequences",
        columns=(
            _PLACEMENT,
            Column(title="truths", digits=0),
            *(_signed(title=f"{which} slope") for which in ("minimum", "median", "maximum")),
            Column(
                title="converged", unit="%", digits=0, help="Share of the fits, at the worst truth and sample size."
            ),
            Column(title="verdicts"),
        ),
        rows=tuple(rows),
        note="Random truths and designs; the gates differ by at least 1 as functions of the input.",
    )


def caution(result: RatesResult) -> Prose:
    """Return what does not follow from the page."""
    paragraphs = [
        "The advantage is one of identification, not of prediction: the regression error falls at the same rate for "
        "all placements. “Exponentially many samples” means “never” here: on an exact gauge orbit the error is that of "
        "the start.",
        "The split of a head into channels is not identified without a gate; the sum of its experts is.",
    ]
    if failed := list_names(sorted({found.placement for found in result.surplus if found.slope.converged < 0.9})):
        paragraphs.append(
            f"With surplus experts too few fits converged for {failed}; the verdict is inconclusive for any slope."
        )
    paragraphs.append(
        "The model is one entry of one head with two experts of width 2. Trained layers have other gates and inputs."
    )
    return Prose(paragraphs=tuple(paragraphs), caution=True)


def _series(placement: str, curve: ErrorCurve) -> Series:
    return Series(label=placement, group=placement, x=curve.x, y=curve.median, low=curve.low, high=curve.high)


def _interval(slope: Slope) -> tuple[float, float, float]:
    return slope.slope, slope.low, slope.high


def _cells(slope: Slope) -> tuple[CellValue, ...]:
    return (*_interval(slope), 100 * slope.converged, slope.verdict)


STUDY = Study(
    name="rates",
    question=QUESTIONS["rates"],
    claim="arXiv 2602.01468 claims that gated experts need polynomially many samples and ungated ones exponentially "
    "many, for mixtures with more fitted than true experts. Here the experts are the channels of one head, which share "
    "one routing, so that without a gate only their sum can be estimated. Most fits have as many experts as the truth, "
    "and start near it.",
    options=RatesOptions(),
    quick=QUICK,
    result=RatesResult,
    run=run_rates,
    finding=finding,
    view=view,
    table=slope_summary,
)
