import math
from dataclasses import replace

import pytest
import torch
from errors import rejects
from lab_runs import LENGTH, STEPS, model_of, run_of, text_of

from tidegate.lab.training import estimate
from tidegate.lab.training.estimate import estimate_run
from tidegate.lab.training.model import build_model, loss_parts, training_flops
from tidegate.lab.training.optimizers import make_optimizer
from tidegate.lab.training.train import train_step


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return text_of(tmp_path_factory.mktemp("text"))


def test_it_counts_parameters_tokens_and_operations(task):
    run = run_of(task, gate="g1")
    found, model = estimate_run(run), build_model(run.model)
    assert found.num_parameters == model.num_parameters()
    assert found.num_gate_parameters == 2 * 16 * 16
    assert (found.steps, found.tokens) == (STEPS, STEPS * 4 * LENGTH)
    assert found.flops == training_flops(model) * found.tokens


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_memory_of_weights_is_what_weights_gradients_and_state_take(task, optimizer):
    run = run_of(task, optimizer=optimizer)
    model = build_model(run.model, seed=0)
    made = make_optimizer(model, run)
    train_step(model, made, task.load().batch(seed=0, step=0, size=4), run, 0)
    moments = [value for state in made.state.values() for value in state.values() if value.ndim]
    taken = sum(tensor.nbytes for tensor in (*model.parameters(), *(w.grad for w in model.parameters()), *moments))
    assert estimate_run(run).weight_bytes == taken


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"precision": "bf16"}])
@pytest.mark.parametrize("gate", ["none", "g1", "sink"])
def test_the_memory_of_a_batch_is_what_its_graph_keeps_and_its_logits(task, options, gate):
    run = run_of(task, model=model_of(gate, num_layers=3), **options)
    model, kept = build_model(run.model), {}
    own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        part = next(loss_parts(model, task.load().batch(seed=0, step=0, size=4), run.training))
    size = sum(storage.nbytes() for place, storage in kept.items() if place not in own)
    logits = 4 // run.training.accumulate * LENGTH * 256 * 4
    assert estimate_run(run).activation_bytes == pytest.approx(size + logits, rel=0.03)
    del part


def test_blocks_that_are_computed_again_keep_their_input_alone(task):
    deep = model_of("g1", num_layers=12, d_model=32)
    plain = estimate_run(run_of(task, model=deep))
    again = estimate_run(run_of(task, model=replace(deep, checkpoint_blocks=True)))
    assert again.activation_bytes < plain.activation_bytes / 3
    assert again.flops == plain.flops


def test_the_time_is_measured_where_there_is_memory_for_a_step(task, monkeypatch):
    run = run_of(task)
    measured = estimate_run(run)
    assert measured.step_seconds > 0
    assert measured.hours == pytest.approx(STEPS * measured.step_seconds / 3600)
    assert measured.flops_per_second == pytest.approx(measured.flops / STEPS / measured.step_seconds)
    monkeypatch.setattr(estimate, "available_bytes", lambda device: 1000)
    refused = estimate_run(run)
    assert (refused.step_seconds, refused.hours, refused.flops_per_second) == (None, None, None)
    assert refused.why_not_measured.endswith("0.0 GiB are free here")


def test_the_hours_elsewhere_follow_from_the_rate(task):
    found = estimate_run(run_of(task))
    assert found.hours_at(4e14, 0.4) == pytest.approx(found.flops / 1.6e14 / 3600)
    for flops, mfu, field in [(0, 0.4, "flops"), (math.nan, 0.4, "flops"), (1e12, 1.5, "mfu")]:
        with rejects(field):
            found.hours_at(flops, mfu)
