import os

import pytest
from lab_runs import LENGTH, Deadly, model_of, run_of

from tidegate.config import VisionConfig
from tidegate.lab.compare import cost
from tidegate.lab.compare.cost import measure_costs
from tidegate.lab.tasks.image import image_task
from tidegate.lab.training.model import build_model
from tidegate.lab.training.records import RecordFile

WIDE = 4096
"""Channels of wide feed-forward layers."""


@pytest.fixture
def unweighed(monkeypatch):
    """Memory is measured in a process of its own, which takes its time."""
    monkeypatch.setattr(cost, "_peak_bytes", lambda run: None)


def two_variants(task):
    return {"none": run_of(task, gate="none"), "wide": run_of(task, model=model_of("none", d_ff=WIDE))}


def test_a_measurement_of_two_variants(task, tmp_path, monkeypatch):
    runs = two_variants(task)
    peak_bytes = cost._peak_bytes
    # Of the control it is measured below.
    monkeypatch.setattr(cost, "_peak_bytes", lambda run: None if run == runs["none"] else peak_bytes(run))
    threshold = os.environ.get(cost._THRESHOLD)
    costs = measure_costs(runs, control="none", request="abc", rounds=5)
    control, wide = costs.items
    assert (control.variant, wide.variant, costs.request) == ("none", "wide", "abc")
    assert (control.time_ratio_low, control.time_ratio, control.time_ratio_high) == (1.0, 1.0, 1.0)
    assert 1 < wide.time_ratio_low <= wide.time_ratio <= wide.time_ratio_high
    assert control.tokens_per_second > wide.tokens_per_second > 0
    assert control.decode_milliseconds > 0
    # The widened layers alone keep (B, T, d_ff) floats three times over, and as large gradients.
    activations = 2 * 3 * 4 * LENGTH * WIDE * 4
    assert activations < wide.peak_bytes < 2 * activations
    assert control.peak_bytes is None
    assert os.environ.get(cost._THRESHOLD) == threshold
    file = RecordFile(tmp_path / "records.jsonl")
    file.append(costs)
    assert file.read() == [costs]


def test_the_cache_holds_keys_and_values_of_every_layer(task, unweighed):
    model = model_of("none", num_heads=4, num_kv_heads=2)
    runs = {"none": run_of(task, model=model)}
    (found,) = measure_costs(runs, control="none", request="", rounds=2).items
    filled = build_model(model)
    caches = filled.new_caches()
    filled(task.load().probe().inputs[:1], caches=caches)
    assert found.cache_bytes_per_token == sum(cache.num_bytes for cache in caches) // LENGTH


def test_a_model_that_does_not_generate_has_no_decoding(unweighed):
    model = VisionConfig(gate="none", d_model=16, num_layers=1, num_heads=2, image_size=8, patch_size=4, channels=1)
    (found,) = measure_costs({"none": run_of(image_task(), model=model)}, control="none", request="", rounds=2).items
    assert (found.decode_milliseconds, found.cache_bytes_per_token) == (None, None)
    assert found.tokens_per_second > 0


def test_learned_positions_decode_within_their_table(task, unweighed):
    run = run_of(task, model=model_of("none", positions="learned"))
    (found,) = measure_costs({"none": run}, control="none", request="", rounds=2).items
    assert found.decode_milliseconds > 0


def test_what_is_timed_takes_turns(monkeypatch):
    turns = []
    works = {name: lambda name=name: turns.append(name) for name in "abc"}
    seconds = cost._in_turns(works, 4)
    assert "".join(turns) == "abc" + "bca" + "cab" + "abc" + "bca"
    assert [len(own) for own in seconds.values()] == [4, 4, 4]


def test_a_process_that_dies_leaves_its_memory_unknown(task, monkeypatch):
    monkeypatch.setattr(cost, "_measure_peak", Deadly("measure"))
    assert cost._peak_bytes(run_of(task)) is None
