"""Where verdicts hold on the map of rates and starts, and how much of the rate a variant tolerates."""

from dataclasses import replace

import pytest
from lab_lines import page_of, replanned, with_trials

from tidegate.lab.compare.robustness import rate_panels, robustness_map, tolerance_of, turning_sentence
from tidegate.lab.compare.summary import summarise
from tidegate.lab.training.records import Grid

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


def test_a_sentence_says_where_a_variant_is_better_and_where_worse(compared):
    _, plan, tuning = trials(compared)
    points = robustness_map(plan, tuning)
    assert turning_sentence(points, "g1") == (
        "g1 compared with the baseline: "
        "significantly lower loss at 3 of 6 settings (init 0.02, rate 0.005 and 0.01 and 0.02); "
        "significantly higher loss at 3 of 6 settings (init torch, rate 0.005 and 0.01 and 0.02)."
    )
    assert turning_sentence(points, "bma-query").endswith(": no significant difference at 6 of 6 settings.")


def test_a_point_at_which_a_variant_diverged_has_no_number_for_it(compared):
    _, plan, tuning = trials(compared, lambda v, b, r, s: None if (v, r) == ("g1", 2.0) else loss(v, b, r, s))
    points = robustness_map(plan, tuning)
    verdicts = {(p.start, round(p.lr, 6)): p.comparison["g1"].verdict for p in points}
    assert verdicts["0.02", 0.02] == verdicts["torch", 0.02] == "diverged"
    assert turning_sentence(points, "g1").endswith("; no verdict at 2 of 6 settings.")


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
    assert "Robustness to learning rate and initialization" not in [
        section.title for section in page_of(lines).sections
    ]


def lowest(variant, block, rate, start):
    return 2.0 + 0.1 * block + (variant == "g1") + 0.5 * (start == "torch") + abs(rate - 1)


def drawn(compared, loss, grid=GRID):
    lines, *_ = trials(compared, loss, grid)
    (panel,) = rate_panels(summarise(lines))
    return {series.label: series.y for series in panel.series}


def test_loss_is_drawn_against_the_rate_at_each_blocks_best_start(compared):
    assert list(rate_panels(summarise(compared))) == []
    assert drawn(compared, lowest)["none"] == pytest.approx((2.6, 2.1, 3.1))

    def stepwise(variant, block, rate, start):
        chosen = "torch" if (variant, block) == ("none", 0) else 0.02
        loss = lowest(variant, block, rate, start) - (start == chosen)
        return "not tried" if rate != 1.0 and start != chosen else loss

    found = drawn(compared, stepwise, replace(GRID, search="stepwise"))
    assert found["none"][0] == pytest.approx((1.5 + 0.5 + 1.6 + 1.7) / 3)


def test_a_trial_that_diverged_leaves_a_gap(compared):
    found = drawn(compared, lambda v, b, r, s: None if (v, b, r) == ("none", 1, 2.0) else lowest(v, b, r, s))
    assert found["none"][2] is None
    assert None not in found["g1"]


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
