from dataclasses import replace

import pytest
import torch
from covers import axis, over
from errors import rejects
from lab_runs import cost_of, model_of, request_of, run_of

from tidegate.config import VisionConfig
from tidegate.gates import Gates
from tidegate.lab.compare.design import match_parameters, match_steps, num_parameters
from tidegate.lab.compare.presets import PRESETS
from tidegate.lab.tasks.catalogue import make_task
from tidegate.lab.tasks.recall import RecallTask
from tidegate.lab.training.model import build_model, training_flops
from tidegate.lab.training.records import Costs

GATES = ("none", "g1", "bma", "bma-query")
SIZES = axis({f"{kind} {name}": (kind, name) for kind in PRESETS for name in PRESETS[kind]}, "lm tiny")


def test_parameters_are_counted_without_being_made():
    for config in (model_of("g1+bma"), VisionConfig(gate="g1", d_model=16, num_layers=2, num_heads=2)):
        assert num_parameters(config) == sum(p.numel() for p in build_model(config).parameters())


@over(size=SIZES, gate=axis(GATES, "g1"))
def test_every_preset_matches_parameters_within_a_thousandth_for_every_gate(size, gate):
    kind, name = size
    preset, task = PRESETS[kind][name], make_task(kind)
    task = task if preset.length is None else replace(task, length=preset.length)
    target = num_parameters(preset.model(task, task.load(), Gates()))
    matched = match_parameters(preset.model(task, task.load(), Gates.parse(gate)), target)
    assert num_parameters(matched) == pytest.approx(target, rel=1e-3)
    assert max(matched.d_ff) - min(matched.d_ff) <= 1


@pytest.mark.parametrize("options", [{"d_ff": 20}, {"feedforward": "gelu"}, {"bias": True}, {"num_layers": 1}])
def test_a_model_matched_to_itself_keeps_its_widths(options):
    config = model_of("none", **options)
    matched = match_parameters(config, num_parameters(config))
    assert set(matched.d_ff) == {config.feedforward_width}


@pytest.mark.parametrize("target", [9000, 9012, 9050, 9999])
def test_no_width_comes_nearer(target):
    config = match_parameters(model_of("g1"), target)
    missed = abs(num_parameters(config) - target)
    for change in (-1, 1):
        widths = (config.d_ff[0] + change, *config.d_ff[1:])
        assert missed <= abs(num_parameters(replace(config, d_ff=widths)) - target)


def test_shared_weights_keep_shared_leading_slices():
    control = model_of("none")
    matched = match_parameters(model_of("g1"), num_parameters(control))
    own, other = (build_model(config, seed=3).state_dict() for config in (control, matched))
    assert num_parameters(matched) < num_parameters(model_of("g1"))
    for name, weight in own.items():
        common = tuple(slice(min(sizes)) for sizes in zip(weight.shape, other[name].shape, strict=True))
        assert torch.equal(weight[common], other[name][common]), name


def test_a_model_that_cannot_be_made_thin_enough_is_an_error():
    with rejects("match", hint="Use a larger preset"):
        match_parameters(model_of("g1"), 100)


TASK = RecallTask()


def matched(runs, match, **ratios):
    """The runs, the first the control, matched by measured costs."""
    costs = Costs(request="", items=tuple(cost_of(name, ratio) for name, ratio in ratios.items()), environment={})
    return match_steps(request_of(TASK, ",".join(runs), match=match), runs, costs)


@pytest.mark.parametrize("gate", [*GATES[1:], "g1+bma"])
@pytest.mark.parametrize("steps", [1, 10, 1024])
def test_flops_are_matched_to_within_a_step(gate, steps):
    runs = {name: run_of(TASK, gate=name, steps=steps) for name in ("none", gate)}
    found = matched(runs, "flops")
    wanted, each = (training_flops(build_model(own.model)) for own in runs.values())
    assert abs(found[gate].training.steps * each - steps * wanted) <= max(each / 2, each - wanted)
    assert found["none"] == runs["none"]
    assert replace(found[gate], training=runs[gate].training) == runs[gate]


def test_time_is_matched_by_the_ratio_that_was_measured():
    ratios = {"none": 1.0, "g1": 1.25, "g2": 2.0, "g3": 0.5, "g4": 1000.0}
    found = matched({name: run_of(TASK, steps=100) for name in ratios}, "time", **ratios)
    assert [run.training.steps for run in found.values()] == [100, 80, 50, 200, 1]
