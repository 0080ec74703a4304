"""The tables of docs/geometry.md are those of the committed records."""

from pathlib import Path

import pytest

from tidegate.lab.studies.boundary.run import correlation_levels, nonlinear_gains
from tidegate.lab.studies.catalogue import STUDIES
from tidegate.lab.studies.study import read_record
from tidegate.lab.studies.trained_layers.run import format_mean, magnitude, positive_share, ratio

DOCS = Path(__file__).parents[3] / "docs"
RECORDS = DOCS / "records" / "geometry"


def row_of(first_cell):
    """The cells after the first of the one row of geometry.md that begins so."""
    rows = [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in (DOCS / "geometry.md").read_text(encoding="utf-8").splitlines()
        if line.strip().startswith("|")
    ]
    (row,) = [row[1:] for row in rows if row[0] == first_cell]
    return row


def written(value, digits=3, sign="+"):
    return f"{value:{sign}.{digits}f}".replace("-", "−")


@pytest.fixture(scope="module")
def boundary():
    return read_record(STUDIES["boundary"], RECORDS / "boundary.json")


def test_what_variants_gain_on_bent_boundaries(boundary):
    bent = nonlinear_gains(boundary)
    for task, found in bent.by_task.items():
        cells = [f"**{written(each.value)}**" if each.low * each.high > 0 else written(each.value) for each in found]
        assert row_of(task)[1:] == cells
    assert row_of("mean of the five")[1:] == [written(each.value) for each in bent.together]
    assert row_of("mean without shells")[1:] == [written(each.value) for each in bent.without]


def test_the_correlation_at_every_level(boundary):
    names = (
        "within tasks, all variants",
        "within the shells",
        "within the other four tasks",
        "over all trials",
        "over the means of the seven variants",
    )
    for name, each in zip(names, correlation_levels(boundary, nonlinear_gains(boundary)), strict=True):
        value, low, high = (written(number, 2, "") for number in (each.value, each.low, each.high))
        assert row_of(name) == [f"{value} ({low} … {high})"]


def test_how_trained_layers_bend():
    result = read_record(STUDIES["trained-layers"], RECORDS / "trained-layers.json")
    plain = result.of("none", trained=True)
    for gate in result.options.gates:
        start, end = (result.of(gate, trained=trained) for trained in (False, True))
        assert len(start) == len(end) == 5
        figures = [magnitude(start), magnitude(end), ratio(end, start), positive_share(end)]
        assert row_of(gate) == [*map(format_mean, figures), "" if gate == "none" else format_mean(ratio(end, plain))]


def exponents_of(curve, depths):
    first, *between, last = curve.local_exponents(depths)
    ends = [f"{each.value:.2f} ({each.low:.2f} … {each.high:.2f})" for each in (first, last)]
    return [ends[0], *(f"{each.value:.2f}" for each in between), ends[1]]


def test_the_exponents_of_depth():
    result = read_record(STUDIES["depth"], RECORDS / "depth.json")
    bent = [curve for curve in result.curves if curve.regime == "structured" and not curve.flat]
    assert len(bent) == 4
    for curve in bent:
        assert row_of(f"`{curve.gate}`") == exponents_of(curve, result.options.depths)


def test_the_exponents_of_full_curvature():
    result = read_record(STUDIES["depth"], RECORDS / "depth-full" / "depth.json")
    assert result.options.tangent == "full"
    for curve in result.curves:
        first, *between, last = row_of(f"`{curve.gate}`, full")
        assert between == exponents_of(curve, result.options.depths)
        assert [first, last] == [f"{level:.2g}" for level in (curve.levels[0], curve.levels[-1])]
