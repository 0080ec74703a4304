from dataclasses import replace
from statistics import fmean, pstdev

import pytest
from lab_lines import diverged, lines_of
from lab_runs import tampered

from tidegate.lab.compare.panels.mechanism import MAP_RANK, mechanism_panels
from tidegate.lab.compare.summary import summarise
from tidegate.lab.tasks.image import image_task
from tidegate.lab.training.records import Record
from tidegate.torch.observing import CLOSED_BELOW, statistic_names

ATTENTION = ["first-key mass", "first-key impact", "first-key contribution", "entropy (nats)"]
COURSES = [
    "first-key mass",
    "first-key impact",
    "first-key contribution",
    "entropy",
    "largest activation",
    "effective rank",
]
COURSES += [MAP_RANK]
NORMS = ["gradient norm", "gates' gradient norm"]


def views_of(panels, title):
    return next(
        {view.label: view.panel for view in panel.views}
        for panel in panels
        if panel.kind == "views" and panel.title == title
    )


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


def test_gates_are_mapped_by_layer_and_head_as_means_over_seeds(compared):
    summary = summarise(compared)
    views = views_of(mechanism_panels(summary), "Gates by layer and head")
    assert list(views) == ["mean gate", f"share below {CLOSED_BELOW}", "spread over tokens"]
    for name, field in zip(views, ("mean", "below", "spread"), strict=True):
        maps = maps_of(views[name])
        assert list(maps) == ["g1", "bma-query"]
        for variant in summary.variants[1:]:
            expected = mean_over_runs(variant, lambda seen, f=field: next(iter(seen.gates.values()))[f])
            assert flat(maps[variant.name]) == pytest.approx(flat(expected))


def test_titles_of_gate_maps_give_the_range(compared):
    panel = views_of(mechanism_panels(summarise(compared)), "Gates by layer and head")["mean gate"]
    numbers = [value for values in maps_of(panel).values() for value in flat(values)]
    assert panel.title.endswith(f"from {min(numbers):.3f} to {max(numbers):.3f}")
    assert "g1: layer 0 " in panel.alternative


def test_attention_is_mapped_for_all_variants_the_control_too(compared):
    summary = summarise(compared)
    views = views_of(mechanism_panels(summary), "Attention by layer and head")
    assert list(views) == [*ATTENTION, MAP_RANK]
    assert set(ATTENTION) <= set(statistic_names("the first key").values())
    fields = ("sink_mass", "sink_impact", "sink_contribution", "entropy", "map_rank")
    for name, field in zip(views, fields, strict=True):
        for variant in summary.variants:
            expected = mean_over_runs(variant, lambda seen, f=field: getattr(seen, f))
            assert flat(maps_of(views[name])[variant.name]) == pytest.approx(flat(expected))
            assert f"{variant.name} {fmean(flat(expected)):.3f}" in views[name].title


def with_observations(lines, **fields):
    """The lines, in which every observation has these fields."""
    return [
        replace(line, observations=tuple(replace(seen, **fields) for seen in line.observations))
        if isinstance(line, Record)
        else line
        for line in lines
    ]


def weight_table(lines):
    return next(panel for panel in mechanism_panels(summarise(lines)) if panel.title == "Where the attention goes")


def test_the_table_of_weights_sets_the_first_token_beside_all_others(compared):
    summary = summarise(compared)
    table = weight_table(compared)
    assert [row[0] for row in table.rows] == ["none", "g1", "bma-query"]
    for variant, (_, first, strongest, sink, others, added) in zip(summary.variants, table.rows, strict=True):
        mass = flat(mean_over_runs(variant, lambda seen: seen.sink_mass))
        assert (first, strongest) == pytest.approx((fmean(mass), max(mass)))
        assert sink is None
        assert first + others == pytest.approx(1)
        assert added == pytest.approx(fmean(flat(mean_over_runs(variant, lambda seen: seen.sink_contribution))))


def test_the_table_of_weights_takes_a_sink_from_what_the_keys_have(compared):
    seen = with_observations(compared, sink_mass=((0.1, 0.2),) * 2, sink_logit=((0.5, 0.25),) * 2)
    for row in weight_table(seen).rows:
        assert row[1:5] == pytest.approx((0.15, 0.2, 0.375, 0.475))


def test_records_of_before_have_no_maps_of_what_was_not_measured_then(compared):
    older = with_observations(compared, sink_contribution=None, map_rank=None)
    assert [row[-1] for row in weight_table(older).rows] == [None] * 3
    panels = mechanism_panels(summarise(older))
    for title in ("Attention by layer and head", "In the course of the training"):
        assert not {"first-key contribution", MAP_RANK} & set(views_of(panels, title))


def test_specialisation_is_the_spread_of_the_heads_mean_gates(compared):
    summary = summarise(compared)
    table = next(panel for panel in mechanism_panels(summary) if panel.kind == "table")
    assert [row[:2] for row in table.rows] == [("g1", 0.0), ("g1", 1.0), ("bma-query", 0.0), ("bma-query", 1.0)]
    means = mean_over_runs(summary.variants[1], lambda seen: next(iter(seen.gates.values()))["mean"])
    assert table.rows[0][2:4] == pytest.approx((fmean(means[0]), pstdev(means[0])))


def test_courses_follow_the_observations_and_the_curve(compared):
    summary = summarise(compared)
    views = views_of(mechanism_panels(summary), "In the course of the training")
    assert list(views) == [*COURSES, *NORMS]
    record = summary.variants[1].records[0]
    for name, x, y in [
        ("first-key mass", record.observations, [fmean(flat(seen.sink_mass)) for seen in record.observations]),
        ("largest activation", record.observations, [max(seen.largest_activation) for seen in record.observations]),
        ("effective rank", record.observations, [seen.effective_rank[-1] for seen in record.observations]),
        (MAP_RANK, record.observations, [fmean(flat(seen.map_rank)) for seen in record.observations]),
        ("gradient norm", record.curve, [point.gradient_norm for point in record.curve]),
        ("gates' gradient norm", record.curve, [point.gate_gradient_norm for point in record.curve]),
    ]:
        line = next(series for series in views[name].series if series.label == "g1, seed 0")
        assert line.x == tuple(point.tokens / 1e6 for point in x)
        assert line.y == pytest.approx(y)


def test_the_control_has_no_gates_and_no_gradient_of_them(compared):
    views = views_of(mechanism_panels(summarise(compared)), "In the course of the training")
    assert {series.group for series in views["gates' gradient norm"].series} == {"g1", "bma-query"}


def test_a_variant_that_diverged_is_left_out_of_the_maps_and_kept_in_the_courses(compared):
    panels = mechanism_panels(summarise(without(compared, "g1")))
    assert list(maps_of(views_of(panels, "Gates by layer and head")["mean gate"])) == ["bma-query"]
    norms = views_of(panels, "In the course of the training")["gradient norm"]
    assert {series.label for series in norms.series if series.group == "g1"} == {
        "g1, seed 0",
        "g1, seed 1",
        "g1, seed 2",
    }


def test_without_gates_nothing_is_said_of_them(compared):
    def shut(record):
        observations = tuple(replace(seen, gates={}) for seen in record.observations)
        curve = tuple(replace(point, gate_gradient_norm=None) for point in record.curve)
        return replace(record, observations=observations, curve=curve)

    lines = [shut(line) if isinstance(line, Record) else line for line in compared]
    panels = mechanism_panels(summarise(lines))
    assert [panel.title for panel in panels] == [
        "Where the attention goes",
        "Attention by layer and head",
        "In the course of the training",
    ]
    assert list(views_of(panels, "In the course of the training")) == [*COURSES, "gradient norm"]


def test_where_all_gated_runs_diverged_the_title_says_that_none_came_to_the_end(compared):
    panels = mechanism_panels(summarise(without(without(compared, "g1"), "bma-query")))
    course = views_of(panels, "In the course of the training")["gates' gradient norm"]
    assert course.title == "Gates' gradient norm at the end of the training: no run came there"


def test_runs_that_were_not_observed_have_no_panels(compared):
    bare = [replace(line, observations=()) if isinstance(line, Record) else line for line in compared]
    assert mechanism_panels(summarise(bare)) == ()


def test_several_sites_have_a_map_each_and_images_are_counted_as_such():
    summary = summarise(lines_of(image_task(), "none,both=g1+g2", num_seeds=1, batch_size=16))
    panels = mechanism_panels(summary)
    sites = sorted(summary.variants[1].records[0].observations[-1].gates)
    assert len(sites) == 2
    maps = maps_of(views_of(panels, "Gates by layer and head")["mean gate"])
    assert list(maps) == [f"both, {site}" for site in sites]
    assert {view.x_label for view in views_of(panels, "In the course of the training").values()} == {
        "images seen (millions)"
    }
