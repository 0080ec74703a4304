"""Where verdicts hold on the map of rates and starts, and how much of the rate a variant tolerates."""

from dataclasses import replace

import numpy as np
import pytest
from lab_lines import page_of, replanned, with_trials
from lab_runs import with_run

from tidegate.lab.compare.robustness import robustness_map, tolerance_of, turning_sentence
from tidegate.lab.compare.summary import summarise
from tidegate.lab.training.records import Grid
from tidegate.report.page import Maps, Table, Views

GRID = Grid(rates=(0.5, 1.0, 2.0), starts=(0.02, "torch"))
NOISE = {("none", 0): 0.001, ("none", 1): -0.001, ("g1", 1): 0.0012, ("g1", 2): -0.001, ("bma-query", 2): 0.001}


def loss(variant, block, rate, start):
    """g1 is far below the control from 0.02, far above it from torch; bma-query is like the control."""
    effect = {"g1": -0.1 if start == 0.02 else 0.1}.get(variant, 0.0)
    return 2.0 + 0.1 * block + effect + NOISE.get((variant, block), 0.0)


def trials(compared, loss=loss, grid=GRID):
    lines = replanned(with_trials(compared, grid, loss), grid=grid)
    summary = summarise(lines)
    return lines, summary.plan, summary.tuning


def test_every_point_is_judged_like_a_comparison_of_its_own(compared):
    _, plan, tuning = trials(compared)
    points = robustness_map(plan, tuning)
    assert {(point.start, round(point.lr, 6)) for point in points} == {
        (start, rate) for start in ("0.02", "torch") for rate in (0.005, 0.01, 0.02)
    }
    for point in points:
        assert point.comparison["g1"].verdict == ("better" if point.start == "0.02" else "worse")
        assert point.comparison["g1"].difference == pytest.approx(-0.1 if point.start == "0.02" else 0.1, abs=0.002)
        assert point.comparison["bma-query"].verdict in ("equivalent", "inconclusive")


def test_a_sentence_says_where_the_verdict_turns(compared):
    _, plan, tuning = trials(compared)
    points = robustness_map(plan, tuning)
    turning = turning_sentence(points, "g1")
    assert turning.startswith("g1: the verdict turns. It is below none at init 0.02 with 0.005, 0.01, 0.02, and above")
    assert turning_sentence(points, "bma-query") == "bma-query is told apart from none at none of 6 settings."


def test_a_sentence_says_so_if_it_never_turns(compared):
    _, plan, tuning = trials(compared, lambda v, b, r, s: loss(v, b, r, 0.02))
    assert "and nowhere above it; 0 of 6 settings do not" in turning_sentence(robustness_map(plan, tuning), "g1")


def test_a_point_at_which_a_variant_diverged_has_no_number_for_it(compared):
    _, plan, tuning = trials(compared, lambda v, b, r, s: None if (v, r) == ("g1", 2.0) else loss(v, b, r, s))
    verdicts = {(p.start, round(p.lr, 6)): p.comparison["g1"].verdict for p in robustness_map(plan, tuning)}
    assert verdicts["0.02", 0.02] == verdicts["torch", 0.02] == "diverged"


@pytest.mark.parametrize(
    "is_left_out",
    [
        lambda block, rate, start: rate == 2.0 and block == 0,
        lambda block, rate, start: rate != 1.0 and start == "torch",
    ],
    ids=["a block", "a stepwise search in which all blocks chose one start"],
)
def test_an_incomplete_grid_has_no_map(compared, is_left_out):
    lines, plan, tuning = trials(compared, lambda v, b, r, s: "not tried" if is_left_out(b, r, s) else loss(v, b, r, s))
    assert robustness_map(plan, tuning) == ()
    assert "Where the verdict holds" not in [section.title for section in page_of(lines).sections]


def test_the_page_draws_it_by_name_with_intervals_and_sentences(compared):
    lines, *_ = trials(compared)
    section = next(section for section in page_of(lines).sections if section.title == "Where the verdict holds")
    views = next(panel for panel in section.panels if isinstance(panel, Views))
    maps = views.views[0].panel
    assert isinstance(maps, Maps)
    assert (maps.row_names, maps.column_names) == (("0.02", "torch"), ("0.005", "0.01", "0.02"))
    assert {map_.label for map_ in maps.maps} == {"g1", "bma-query"}
    table, tolerance = (panel for panel in section.panels if isinstance(panel, Table))
    assert len(table.rows) == 2 * 6
    assert len(tolerance.rows) == 3
    assert section.panels[0].paragraphs[0].startswith("g1: the verdict turns.")


def test_many_blocks_say_how_often_the_procedure_is_wrong(compared):
    generator = np.random.default_rng(0)
    noise = {
        (v, b, r, s): generator.normal()
        for v in ("none", "g1", "bma-query")
        for b in range(20)
        for r in GRID.rates
        for s in GRID.starts
    }
    blocks = [
        replace(with_run(line, block=line.run.block + 3 * n, seed=3 * n), id=f"{line.id}-{n}")
        for line in compared
        for n in range(7)
        if line.kind == "run" and line.run.block + 3 * n < 20
    ]
    lines = [*(line for line in compared if line.kind != "run"), *blocks]
    lines = replanned(with_trials(lines, GRID, lambda *place: 2.0 + 0.005 * noise[place]), grid=GRID, num_seeds=20)
    section = next(section for section in page_of(lines).sections if section.title == "Where the verdict holds")
    *_, table = (panel for panel in section.panels if isinstance(panel, Table))
    assert table.title == "How often the procedure is wrong, tuning included"
    for _, number, alarms, limit, seen in table.rows:
        assert number == 4000
        assert 0 < alarms < limit < 9
        assert seen > 50


def curve(compared, **losses):
    """The trials of one variant in one block, at rates that are powers of two times its own."""
    grid = Grid(rates=tuple(2.0**octave for octave in range(len(losses["g1"]))), starts=(0.02,))
    lines = with_trials(compared, grid, lambda v, b, r, s: losses["g1"][grid.rates.index(r)])
    chosen = [line for line in lines if line.kind == "run" and line.run.role == "tuning"]
    return [line for line in chosen if (line.run.variant, line.run.block) == ("g1", 0)]


@pytest.mark.parametrize(
    ("losses", "octaves", "reaches_end"),
    [
        ((3.0, 2.0, 3.0), 2 * 0.02, False),
        ((2.04, 2.0, 2.0, 2.04), 1 + 2 * 0.5, False),
        ((2.0, 2.0, 2.0), 2.0, True),
        ((2.0, 2.04, 2.04), 0.5, True),
        ((2.0, None, 2.0), 0.0, True),
        ((2.5, 2.0, None), 0.04, False),
    ],
)
def test_tolerance_is_the_width_of_the_rates_within_one_percent_of_the_best(compared, losses, octaves, reaches_end):
    found = tolerance_of(curve(compared, g1=losses))
    assert found.octaves == (pytest.approx(octaves),)
    assert found.reaches_end == reaches_end


def test_tolerance_names_the_lowest_rate_that_diverged_and_counts_spikes(compared):
    own = curve(compared, g1=(2.0, None, None))
    found = tolerance_of([replace(record, num_spikes=3) for record in own])
    assert found.diverged_at == pytest.approx(2e-2)
    assert found.spikes == 3
    assert tolerance_of(curve(compared, g1=(None, None, None))).octaves == (None,)
