import json
import math
from dataclasses import replace
from statistics import fmean

import pytest

from tidegate.lab.observe.page import observation_page, observation_sections
from tidegate.report import write_page
from tidegate.torch.observing import (
    HISTOGRAM_EDGES,
    GateSummary,
    LayerObservation,
    Moments,
    Observation,
    ResidualSummary,
    statistic_names,
)

STATISTICS = ("entropy", "effective_keys", "mass", "impact", "contribution", "mean_score")
NAMES = {key: name for key, name in statistic_names("the first key").items() if key in STATISTICS}


def moments(statistic, mean):
    empty = max(len(HISTOGRAM_EDGES.get(statistic, ())) - 5, 0)
    histogram = (0, 0, 30, 10, *[0] * empty) if statistic in HISTOGRAM_EDGES else ()
    return Moments(count=40, mean=mean, std=mean / 4, low=0.0, high=1.0, histogram=histogram)


def layer(place, *, num_heads=2, length=6, gates=None, residual=True):
    means = {name: [0.1 * (index + 1) + 0.01 * place for index in range(num_heads)] for name in STATISTICS}
    return LayerObservation(
        name=f"model.layers.{place}.self_attn",
        num_heads=num_heads,
        heads={name: tuple(moments(name, mean) for mean in means[name]) for name in STATISTICS},
        positions=tuple(range(length)),
        by_position={
            name: tuple(tuple(mean + position for position in range(length)) for mean in means[name])
            for name in STATISTICS
        },
        gates=gates or {},
        residual=ResidualSummary(largest=3.0 + place, effective_rank=5.0 - place) if residual else None,
    )


def observation(*layers):
    return Observation(layers=layers, num_batches=3, keys="the first key")


def gate(*means):
    shares = tuple(mean / 2 for mean in means)
    return GateSummary(mean=means, below=shares, saturated=None, token_spread=shares, head_spread=0.05)


def page_of(seen):
    return observation_page(seen, model="a model", command="tidegate observe", num_sequences=4, length=6)


def views_of(seen, section, title):
    panels = next(each.panels for each in observation_sections(seen) if each.title == section)
    found = next(panel for panel in panels if panel.kind == "views" and panel.title == title)
    return {view.label: view.panel for view in found.views}


def test_maps_hold_the_mean_of_every_head():
    seen = observation(layer(0), layer(1, num_heads=3))
    views = views_of(seen, "Attention", "By layer and head")
    assert set(views) == set(NAMES.values())
    for key, name in NAMES.items():
        means = [[each.mean for each in one.heads[key]] for one in seen.layers]
        assert views[name].maps[0].values == ((*means[0], None), tuple(means[1]))
    assert "most 0.310 (layer 1, head 2)" in views["first-key mass"].title


def test_curves_are_means_over_the_heads_of_a_layer():
    seen = observation(layer(0), layer(1))
    lines = views_of(seen, "Attention", "By position of the query")["entropy (nats)"].series
    assert [line.label for line in lines] == ["layer 0", "layer 1"]
    for one, line in zip(seen.layers, lines, strict=True):
        assert line.x == tuple(range(6))
        assert line.y == pytest.approx([fmean(values) for values in zip(*one.by_position["entropy"], strict=True)])


def test_distributions_are_shares_of_all_queries_of_a_layer():
    views = views_of(observation(layer(0)), "Attention", "Distribution over queries")
    for name, middle in (("first-key mass", 0.125), ("effective keys", math.sqrt(32))):
        (line,) = views[name].series
        assert line.y == (0.0, 0.0, 0.75, 0.25)
        assert line.x[2] == pytest.approx(middle)


def test_gates_have_a_map_for_each_site_and_metric():
    seen = observation(
        layer(0, num_heads=4, gates={"output": gate(0.1, 0.2, 0.3, 0.4), "value": gate(0.5, 0.6)}),
        layer(1, num_heads=4, gates={"output": gate(0.2, 0.2, 0.3, 0.4)}),
    )
    views = views_of(seen, "Gates", "By layer and head")
    # An activation without two ends has no saturation.
    assert list(views) == ["mean gate", "share below 0.1", "spread over tokens"]
    output, value = views["mean gate"].maps
    assert output.values == ((0.1, 0.2, 0.3, 0.4), (0.2, 0.2, 0.3, 0.4))
    assert value.values == ((0.5, 0.6), (None, None))


def test_tables_have_a_row_for_every_head_with_the_gate_of_its_group_and_for_every_layer():
    seen = observation(layer(0, num_heads=4, gates={"value": gate(0.5, 0.6)}), layer(1))
    heads, layers = observation_sections(seen)[-1].panels
    titles = [each.title for each in heads.columns]
    assert [row[:2] for row in heads.rows] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]
    assert [row[titles.index("value: mean gate")] for row in heads.rows] == [0.5, 0.5, 0.6, 0.6, None, None]
    assert heads.rows[5][titles.index("first-key mass")] == seen.layers[1].heads["mass"][1].mean
    assert [(row[1], row[-1]) for row in layers.rows] == [(seen.layers[0].name, 0.05), (seen.layers[1].name, None)]


def test_missing_data_have_no_section():
    seen = observation(layer(0, residual=False))
    assert [each.title for each in observation_sections(seen)] == ["Attention", "How to read it", "All numbers"]
    views = views_of(observation(layer(0), layer(1)), "Residual stream", "By layer")
    assert views["largest activation"].series[0].y == (3.0, 4.0)
    assert views["effective rank"].series[0].y == (5.0, 4.0)


def test_long_curves_are_averaged_and_keep_their_mean():
    seen = observation(layer(0, length=1024))
    read = Observation.from_json(json.dumps(page_of(seen).data["observation"]))
    (short,), (whole,) = read.layers, seen.layers
    assert short.positions == tuple(range(3, 1024, 8))
    for name in STATISTICS:
        assert fmean(short.by_position[name][1]) == pytest.approx(fmean(whole.by_position[name][1]))


def test_a_page_is_written_even_if_numbers_are_not_finite(tmp_path):
    broken = layer(0, gates={"output": gate(math.nan, 0.5)})
    heads = broken.heads | {"entropy": (replace(moments("entropy", math.nan), std=math.inf),) * 2}
    by_position = broken.by_position | {"entropy": ((math.nan,) * 6,) * 2}
    residual = ResidualSummary(largest=math.inf, effective_rank=math.nan)
    page = page_of(observation(replace(broken, heads=heads, by_position=by_position, residual=residual)))
    assert write_page(page, tmp_path).is_file()
