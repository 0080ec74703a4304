import json
import math
from dataclasses import replace

import pytest
from errors import rejects

from tidegate._json import add_checksum
from tidegate.torch.observing.observation import (
    HISTOGRAM_EDGES,
    GateSummary,
    LayerObservation,
    Moments,
    Observation,
    ResidualSummary,
)


def moments(mean, statistic="mass", count=3):
    num_bins = len(HISTOGRAM_EDGES[statistic]) - 1
    return Moments(count=count, mean=mean, std=0.1, low=0.0, high=1.0, histogram=(count,) + (0,) * (num_bins - 1))


def layer(name="model.layers.0.self_attn", gates=True, num_positions=3):
    means = {"entropy": 1.5, "effective_keys": 4.25, "mass": 0.125, "impact": 0.0625, "mean_score": -1.0}
    curve = tuple(float(i) for i in range(num_positions))
    gate = GateSummary(mean=(0.25, 0.75), below=(0.0, 0.5), saturated=None, token_spread=(0.1, 0.2), head_spread=0.25)
    return LayerObservation(
        name=name,
        num_heads=4,
        heads={
            statistic: tuple(moments(mean + head, statistic) for head in range(4)) for statistic, mean in means.items()
        },
        positions=tuple(range(0, 2 * num_positions, 2)),
        by_position=dict.fromkeys(means, (curve,) * 4),
        gates={"value": gate, "dense": replace(gate, mean=(0.5,), saturated=(0.0,))} if gates else {},
        residual=ResidualSummary(largest=7.0, effective_rank=3.0) if gates else None,
    )


OBSERVATION = Observation(layers=(layer(), layer("b", gates=False)), num_batches=2, keys="the first key")


def test_json_gives_back_the_same():
    assert Observation.from_json(OBSERVATION.to_json()) == OBSERVATION


def test_a_number_that_is_not_finite_is_null_and_comes_back_as_nan():
    stream = ResidualSummary(largest=math.inf, effective_rank=math.nan)
    text = replace(OBSERVATION, layers=(replace(layer(), residual=stream),)).to_json()
    assert '"largest": null' in text
    residual = Observation.from_json(text).layers[0].residual
    assert math.isnan(residual.largest)
    assert math.isnan(residual.effective_rank)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("{}", "digest"),
        ("{", "text"),
        (json.dumps(add_checksum({"layers": [{}], "num_batches": 1, "keys": ""})), "layers[0].name"),
        (json.dumps(add_checksum({"layers": [], "num_batches": None, "keys": ""})), "num_batches"),
    ],
    ids=["empty", "cut", "no layer", "null"],
)
def test_other_json_is_rejected(text, field):
    with rejects("text", hint=f"{field} must be" if field != "text" else ""):
        Observation.from_json(text)


def test_the_table_has_a_line_for_each_head():
    _, header, *rows = OBSERVATION.table().splitlines()
    assert len({len(line) for line in (header, *rows)}) == 1
    cells = [row.split() for row in rows]
    assert [(row[0], row[1]) for row in cells] == [
        (name, str(head)) for name in ("model.layers.0.self_attn", "b") for head in range(4)
    ]
    assert cells[1][2:] == ["2.500", "5.25", "1.1250", "1.0625", "-", "0.2500", "0.5000"]
    assert cells[2][7:] == ["0.7500", "0.5000"]
    assert cells[4][7:] == ["-", "-"]
    # A head without queries has no numbers.
    empty = replace(layer(), heads={name: (moments(0.0, name, count=0),) * 4 for name in layer().heads})
    assert replace(OBSERVATION, layers=(empty,)).table().splitlines()[2].split()[2:6] == ["-"] * 4


@pytest.mark.parametrize(
    ("limit", "means"), [(1, (3,)), (2, (1.5, 5)), (3, (1, 4, 6)), (7, tuple(range(7))), (9, tuple(range(7)))]
)
def test_downsampled_curves_are_means_over_consecutive_positions(limit, means):
    (short,) = replace(OBSERVATION, layers=(layer(num_positions=7),)).downsample(limit).layers
    assert short.positions == tuple(int(2 * mean) for mean in means)
    assert short.by_position["mass"][0] == means
    assert short.heads == layer().heads
    with rejects("num_points"):
        OBSERVATION.downsample(0)
