from dataclasses import replace
from statistics import fmean

import pytest
from lab_lines import diverged
from lab_runs import tampered

from tidegate.lab.compare.mechanism import mechanism_panels
from tidegate.lab.compare.summary import summarise
from tidegate.lab.training.records import Record
from tidegate.torch.observing import CLOSED_BELOW

GATES, ATTENTION, COURSES = "Gates by layer and head", "Attention by layer and head", "Over the course of training"
RANK = "rank of value to output"
BY_HEAD = {
    "weight on the first token": "sink_mass",
    "first-key impact": "sink_impact",
    "added by the first token": "sink_contribution",
    "entropy (nats)": "entropy",
    RANK: "map_rank",
}


def views_of(lines):
    """The views of a comparison's page, by their panel's title and their own label."""
    panels = mechanism_panels(summarise(lines))
    return {panel.title: {view.label: view.panel for view in panel.views} for panel in panels}


def maps_of(panel):
    return {each.label: each.values for each in panel.maps}


def mean_over_runs(variant, figure):
    """Layer by head, the mean over the last observations of the runs."""
    values = [figure(record.observations[-1]) for record in variant.finished]
    return [[fmean(run[layer][head] for run in values) for head in range(2)] for layer in range(2)]


def flat(rows):
    return [value for row in rows for value in row]


def without(lines, variant):
    """The lines, in which that variant's runs diverged."""
    for block in range(3):
        lines = tampered(lines, variant, diverged, block=block)
    return lines


def with_observations(lines, **fields):
    """The lines, in which every observation has these fields."""
    return [
        replace(line, observations=tuple(replace(seen, **fields) for seen in line.observations))
        if isinstance(line, Record)
        else line
        for line in lines
    ]


def test_gates_are_mapped_by_layer_and_head_as_means_over_seeds(compared):
    views = views_of(compared)[GATES]
    assert list(views) == ["mean gate", f"share below {CLOSED_BELOW}", "spread over tokens"]
    for name, field in zip(views, ("mean", "below", "spread"), strict=True):
        maps = maps_of(views[name])
        assert list(maps) == ["g1", "bma-query"]
        for variant in summarise(compared).variants[1:]:
            expected = mean_over_runs(variant, lambda seen, f=field: next(iter(seen.gates.values()))[f])
            assert flat(maps[variant.name]) == pytest.approx(flat(expected))


def test_attention_is_mapped_for_all_variants_the_control_too(compared):
    views = views_of(compared)[ATTENTION]
    assert list(views) == list(BY_HEAD)
    for name, field in BY_HEAD.items():
        for variant in summarise(compared).variants:
            expected = mean_over_runs(variant, lambda seen, f=field: getattr(seen, f))
            assert flat(maps_of(views[name])[variant.name]) == pytest.approx(flat(expected))


def test_records_of_before_have_no_maps_of_what_was_not_measured_then(compared):
    views = views_of(with_observations(compared, sink_contribution=None, map_rank=None))
    for title in (ATTENTION, COURSES):
        assert not {"added by the first token", RANK} & set(views[title])


def test_courses_follow_the_observations_and_the_curve(compared):
    views = views_of(compared)[COURSES]
    record = summarise(compared).variants[1].records[0]
    means = {name: [fmean(flat(getattr(s, field))) for s in record.observations] for name, field in BY_HEAD.items()}
    expected = {
        **{name: (record.observations, values) for name, values in means.items()},
        "largest activation": (record.observations, [max(seen.largest_activation) for seen in record.observations]),
        "rank of the stream": (record.observations, [seen.effective_rank[-1] for seen in record.observations]),
        "gradient norm": (record.curve, [point.gradient_norm for point in record.curve]),
        "gates' gradient norm": (record.curve, [point.gate_gradient_norm for point in record.curve]),
    }
    assert list(views) == list(expected)
    for name, (x, y) in expected.items():
        line = next(series for series in views[name].series if series.label == "g1, seed 0")
        assert line.x == tuple(point.tokens / 1e6 for point in x)
        assert line.y == pytest.approx(y)
    assert {series.group for series in views["gates' gradient norm"].series} == {"g1", "bma-query"}


def test_a_variant_that_diverged_is_left_out_of_the_maps_and_kept_in_the_courses(compared):
    views = views_of(without(compared, "g1"))
    assert list(maps_of(views[GATES]["mean gate"])) == ["bma-query"]
    norms = views[COURSES]["gradient norm"]
    assert {series.label for series in norms.series if series.group == "g1"} == {f"g1, seed {k}" for k in range(3)}


def test_without_gates_nothing_is_said_of_them(compared):
    def shut(record):
        observations = tuple(replace(seen, gates={}) for seen in record.observations)
        curve = tuple(replace(point, gate_gradient_norm=None) for point in record.curve)
        return replace(record, observations=observations, curve=curve)

    views = views_of([shut(line) if isinstance(line, Record) else line for line in compared])
    assert list(views) == [ATTENTION, COURSES]
    assert "gates' gradient norm" not in views[COURSES]


def test_runs_that_were_not_observed_have_no_panels(compared):
    bare = [replace(line, observations=()) if isinstance(line, Record) else line for line in compared]
    assert views_of(bare) == {}
