from dataclasses import replace
from statistics import fmean

import pytest
from lab_lines import diverged, with_seeds
from lab_runs import tampered

from tidegate.lab.compare.curves import difference_panel, length_panel, loss_views
from tidegate.lab.compare.summary import summarise
from tidegate.lab.judging import t_interval
from tidegate.lab.training.records import Record


def bold(panel):
    return {series.label: series for series in panel.series if not series.faint}


def faint(panel):
    return {series.label: series for series in panel.series if series.faint}


def with_gap(place):
    """A change of a record: one of its evaluations has no number."""

    def change(record):
        curve = [replace(point, loss=None) if k == place else point for k, point in enumerate(record.curve)]
        return replace(record, curve=tuple(curve))

    return change


class TestLoss:
    def test_has_a_faint_line_a_run_and_a_bold_one_for_their_mean(self, compared):
        summary = summarise(compared)
        for view, axis in zip(loss_views(summary).views, ("tokens", "flops"), strict=False):
            scale = {"tokens": 1e6, "flops": 1e12}[axis]
            for variant in summary.variants:
                for record in variant.records:
                    line = faint(view.panel)[f"{variant.name}, seed {record.run.seed}"]
                    assert line.y == tuple(point.loss for point in record.curve)
                    assert line.x == tuple(getattr(point, axis) / scale for point in record.curve)
                curves = zip(*(record.curve for record in variant.records), strict=True)
                means = [fmean(point.loss for point in points) for points in curves]
                assert bold(view.panel)[variant.name].y == pytest.approx(means)

    def test_against_time_stands_at_the_seconds_of_the_runs_that_have_them(self, compared):
        summary = summarise(compared)
        panel = loss_views(summary).views[2].panel
        for record in summary.control.records:
            assert faint(panel)[f"none, seed {record.run.seed}"].x == record.timing.seconds
        timeless = [replace(line, timing=None) if isinstance(line, Record) else line for line in compared]
        assert loss_views(summarise(timeless)).views[2].panel.series == ()

    def test_of_a_diverged_run_is_drawn_as_far_as_it_went_and_left_out_of_the_mean(self, compared):
        summary = summarise(tampered(compared, "g1", diverged))
        panel = loss_views(summary).views[0].panel
        lost, *ended = summary.variants[1].records
        assert len(faint(panel)["g1, seed 0"].y) == len(lost.curve) < len(ended[0].curve)
        means = [fmean(p.loss for p in points) for points in zip(*(r.curve for r in ended), strict=True)]
        assert bold(panel)["g1"].y == pytest.approx(means)


class TestDifference:
    def test_is_the_mean_within_seeds_with_its_interval(self, compared):
        summary = summarise(compared)
        panel = difference_panel(summary)
        assert set(bold(panel)) == {"g1", "bma-query"}
        for variant in summary.variants[1:]:
            pairs = list(zip(variant.records, summary.control.records, strict=True))
            line = bold(panel)[variant.name]
            assert line.x[-1] == 100.0
            for k in range(len(line.x)):
                differences = [own.curve[k].loss - other.curve[k].loss for own, other in pairs]
                assert line.y[k] == pytest.approx(fmean(differences))
                assert (line.low[k], line.high[k]) == pytest.approx(t_interval(differences))

    def test_with_a_gap_in_every_run_has_a_gap_there_and_bands_around_it(self, compared):
        lines = compared
        for block in range(3):
            lines = tampered(lines, "none", with_gap(1), block=block)
        whole = bold(difference_panel(summarise(compared)))["g1"]
        gapped = bold(difference_panel(summarise(lines)))["g1"]
        for name in ("y", "low", "high"):
            expected = [None if k == 1 else value for k, value in enumerate(getattr(whole, name))]
            assert list(getattr(gapped, name)) == expected

    def test_leaves_out_pairs_of_which_one_diverged(self, compared):
        summary = summarise(tampered(compared, "none", diverged))
        variant = summary.variants[1]
        pairs = list(zip(variant.records, summary.control.records, strict=True))[1:]
        line = bold(difference_panel(summary))["g1"]
        assert line.y[-1] == pytest.approx(fmean(own.curve[-1].loss - other.curve[-1].loss for own, other in pairs))

    def test_under_one_seed_has_no_band(self, compared):
        line = bold(difference_panel(summarise(with_seeds(compared, 1))))["g1"]
        assert line.low is None
        assert line.high is None
        assert None not in line.y


class TestLength:
    def test_is_drawn_by_position_and_told_as_means_beyond_the_training_length(self, compared):
        panel = length_panel(summarise(compared))
        assert panel.marker == 16.0
        for name, line in bold(panel).items():
            beyond = fmean(y for x, y in zip(line.x, line.y, strict=True) if x > 16)
            assert f"{name} {beyond:.3f}" in panel.alternative

    def test_has_no_panel_where_no_run_has_it(self, compared):
        short = [replace(line, loss_by_position=()) if isinstance(line, Record) else line for line in compared]
        assert length_panel(summarise(short)) is None
