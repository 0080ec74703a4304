"""Precision, compilation and accumulation: options that change how a step is computed, and hardly what it gives."""

import pytest
import torch
from closeness import assert_close
from lab_runs import STEPS, executed, model_of, run_of, text_of, timeless
from torch import nn

from tidegate.lab.tasks.task import NO_TARGET, Batch
from tidegate.lab.training.model import build_model, loss_parts
from tidegate.lab.training.run import Training
from tidegate.lab.training.train import RunContext
from tidegate.torch.block import TransformerBlock
from tidegate.torch.gate import AttentionGate


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return text_of(tmp_path_factory.mktemp("text"))


def gradients(model, batch, training):
    model.zero_grad()
    loss = sum(part.backward() or part.detach() for part in loss_parts(model, batch, training))
    return loss, {name: weight.grad.clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("parts", [2, 4])
def test_the_gradients_of_parts_add_up_to_those_of_the_batch_though_their_targets_are_uneven(parts):
    model = build_model(model_of("bma", vocab_size=128), seed=0).double()
    inputs = torch.randint(128, (4, 9), generator=torch.Generator().manual_seed(0))
    targets = inputs.roll(-1, 1)
    targets[1:, ::2] = NO_TARGET
    batch = Batch(inputs, targets)
    whole, expected = gradients(model, batch, Training(steps=1, batch_size=4))
    loss, found = gradients(model, batch, Training(steps=1, batch_size=4, accumulate=parts))
    assert_close(loss, whole)
    for name, gradient in expected.items():
        assert_close(found[name], gradient, what="gradient")


def test_parts_are_refused_where_a_gate_reads_the_next_sequence(task):
    record = executed(run_of(task, gate="output:input:sigmoid:shuffled", accumulate=2))
    assert record.status == "failed"
    assert "accumulate must be 1 with the gate" in record.error


class TestHalfPrecision:
    def test_weights_updates_and_the_logits_of_gates_stay_float32(self):
        model = build_model(model_of("g1"), seed=0)
        seen, streams = [], []
        for module in model.modules():
            if isinstance(module, AttentionGate):
                logits = module.logits
                module.logits = lambda source, logits=logits: seen.append(found := logits(source)) or found
        model.stack.blocks[0].attention.q_proj.register_forward_hook(lambda *call: streams.append(call[2]))
        tokens = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))
        training = Training(steps=1, batch_size=2, precision="bf16")
        loss, found = gradients(model, Batch(tokens[:, :-1], tokens[:, 1:]), training)
        assert {logits.dtype for logits in seen} == {torch.float32}
        assert streams[0].dtype == torch.bfloat16
        assert loss.dtype == torch.float32
        assert {gradient.dtype for gradient in found.values()} == {torch.float32}

    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_a_run_learns_as_one_in_float32_does(self, task, accumulate):
        exact, half = executed(run_of(task)), executed(run_of(task, precision="bf16", accumulate=accumulate))
        assert half.status == "finished", half.error
        assert half.loss != exact.loss
        assert half.loss == pytest.approx(exact.loss, abs=0.02)

    def test_it_stops_and_goes_on_as_if_never_stopped(self, task, tmp_path):
        goes_on_as_if_never_stopped(run_of(task, precision="bf16"), tmp_path)


def goes_on_as_if_never_stopped(run, folder):
    expected = timeless(executed(run))
    steps = []
    with pytest.raises(Exception, match=run.id):
        executed(run, folder=folder, report=lambda told: steps.append(told.step), stopping=lambda: len(steps) == 5)
    assert timeless(executed(run, folder=folder, report=lambda told: steps.append(told.step))) == expected
    assert steps == list(range(1, STEPS + 1))


def test_muon_stops_and_goes_on_as_if_never_stopped(task, tmp_path):
    goes_on_as_if_never_stopped(run_of(task, optimizer="muon"), tmp_path)


# Inductor takes a minute to build what it makes; the cheaper of these traces the same, and compiles nothing.
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
# The compiler asks inner tensors for a gradient; it hides the warning, but not where warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_blocks_give_the_losses_of_plain_ones(task, monkeypatch, backend):
    monkeypatch.setattr(TransformerBlock, "compile", lambda block: nn.Module.compile(block, backend=backend))
    plain, compiled = executed(run_of(task, gate="g1")), executed(run_of(task, gate="g1", compile=True))
    assert compiled.status == "finished", compiled.error
    assert compiled.loss == pytest.approx(plain.loss, rel=1e-5)
    assert [point.loss for point in compiled.curve] == pytest.approx([point.loss for point in plain.curve], rel=1e-5)
    # Observing watches calls that a compiled block would not make.
    assert compiled.observations[-1].entropy[0] == pytest.approx(plain.observations[-1].entropy[0], rel=1e-4)


def test_the_number_of_threads_is_the_callers_choice_if_there_is_one(task):
    torch.set_num_threads(2)
    executed(run_of(task, num_threads=2, steps=1, num_evaluations=1), num_threads=1)
    assert torch.get_num_threads() == 1


def test_saving_takes_a_small_share_of_the_time():
    context = RunContext(checkpoint_seconds=20)
    assert context.seconds_after(0.1) == 20
    assert context.seconds_after(60) == 1200
    assert RunContext(checkpoint_seconds=0).seconds_after(60) == 0
