"""What the page shows of the runs that tuned."""

import pytest
from lab_lines import page_of, replanned, with_trials

from tidegate.lab.training.records import Grid
from tidegate.report.page import Lines, Table, Views

GRID = Grid(rates=(0.5, 1.0, 2.0), starts=(0.02, "torch"))


def panels(lines):
    section = next(section for section in page_of(lines).sections if section.title == "Was it fair?")
    return {panel.title: panel for panel in section.panels if isinstance(panel, Views | Lines | Table)}


def loss(variant, block, rate, start):
    return 2.0 + 0.1 * block + (variant == "g1") + 0.5 * (start == "torch") + abs(rate - 1)


@pytest.fixture(scope="module")
def lines(compared):
    return replanned(with_trials(compared, GRID, loss), grid=GRID)


def test_without_tuning_nothing_is_drawn(compared):
    assert not panels(compared)


def test_every_start_has_a_view_of_the_mean_loss_at_each_rate(lines):
    views = {view.label: view.panel for view in panels(lines)["Loss against learning rate"].views}
    assert list(views) == ["init 0.02", "init torch"]
    own = {series.label: series for series in views["init torch"].series}
    assert own["none"].y == pytest.approx((3.1, 2.6, 3.6))
    assert [rate / own["none"].x[1] for rate in own["none"].x] == [0.5, 1.0, 2.0]


def test_a_run_that_diverged_leaves_a_gap(compared):
    def gap(variant, block, rate, start):
        return None if (variant, block, rate) == ("none", 1, 2.0) else loss(variant, block, rate, start)

    found = panels(replanned(with_trials(compared, GRID, gap), grid=GRID))["Loss against learning rate"]
    own = {series.label: series for series in found.views[0].panel.series}
    assert own["none"].y[2] is None
    assert None not in own["g1"].y


def test_a_stepwise_search_is_drawn_at_the_start_that_each_block_chose(compared):
    grid = Grid(rates=GRID.rates, starts=GRID.starts, search="stepwise")

    def stepwise(variant, block, rate, start):
        chosen = "torch" if (variant, block) == ("none", 0) else 0.02
        return "not tried" if rate != 1.0 and start != chosen else loss(variant, block, rate, start)

    found = panels(replanned(with_trials(compared, grid, stepwise), grid=grid))
    (drawn,) = (panel for panel in found.values() if isinstance(panel, Lines))
    none = next(series for series in drawn.series if series.label == "none")
    assert none.y[0] == pytest.approx((2.5 + 0.5 + 2.6 + 2.7) / 3)
    (table,) = (panel for panel in found.values() if isinstance(panel, Table))
    assert table.rows[0] == ("none", pytest.approx(2.1), pytest.approx(2.6))
