"""The step of one position against a call of the model; tests/torch/test_generate.py holds it to recomputation."""

import pytest
import torch
from closeness import assert_close
from covers import axis, over
from torch import nn

from tidegate import PRESETS
from tidegate.config import TransformerConfig
from tidegate.torch.decoder import TransformerLM
from tidegate.torch.gate import AttentionGate

SIZES = {"vocab_size": 31, "d_model": 24, "num_layers": 2, "max_length": 32}
BUILDS = {
    "as it comes": {},
    "everything": {"bias": True, "qk_norm": True, "metric": "learned", "num_kv_heads": 2, "window": 4},
    "diagonal metric": {"metric": "diagonal", "num_kv_heads": 1, "temperature": 1.7},
    "old style": {
        "norm": "layer",
        "feedforward": "gelu",
        "positions": "learned",
        "bias": True,
        "tie_embeddings": False,
    },
}
every_gate_and_build = over(
    gate=axis(["none", *PRESETS, "g1+bma", "sink+g1"], "bma", "g1"), build=axis(BUILDS, "everything")
)


def make(dtype=torch.float64, **options):
    model = TransformerLM(TransformerConfig(**SIZES | options), dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype))
    return model


def read_both(model, *, mask=None, positions=None):
    """The logits of one more token of three rows, by the step and by the model, each after caches of its own."""
    tokens = torch.randint(31, (3, 7), generator=torch.Generator().manual_seed(1))
    step, both = model.decode_step(), []
    with torch.no_grad():
        for read in (lambda **seen: step(tokens[:, 6:], **seen), lambda **seen: model(tokens[:, 6:], **seen)[:, 0]):
            caches = model.new_caches(7)
            model(tokens[:, :6], caches=caches, mask=None if mask is None else mask[..., :6])
            both.append(read(caches=caches, mask=mask, positions=positions))
            assert [cache.length for cache in caches] == [7, 7]
    return both


@every_gate_and_build
def test_the_step_gives_the_logits_of_the_model(gate, build):
    stepped, called = read_both(make(gate=gate, **build))
    assert_close(stepped, called, what="forward")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_step_rounds_as_the_model_does(dtype):
    stepped, called = read_both(make(dtype, gate="bma", qk_norm=True))
    assert stepped.dtype == dtype
    assert torch.equal(stepped, called)


@pytest.mark.parametrize("build", BUILDS.values(), ids=list(BUILDS))
def test_the_step_takes_masks_and_positions(build):
    mask = torch.ones(3, 1, 1, 7, dtype=torch.bool)
    mask[1, ..., :5] = False
    stepped, called = read_both(make(gate="g1", **build), mask=mask, positions=torch.tensor([[6], [1], [9]]))
    assert_close(stepped, called, what="forward")
    assert not torch.allclose(stepped, read_both(make(gate="g1", **build))[0])


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def replace_a_projection(model):
    model.stack.blocks[1].attention.v_proj = Doubled(24, 24, bias=False, dtype=torch.float64)


def hook_a_gate(model):
    gate = next(part for part in model.modules() if isinstance(part, AttentionGate))
    gate.register_forward_hook(lambda part, inputs, values: 0.5 * values)


def hook_a_norm_before(model):
    model.stack.blocks[0].attention_norm.register_forward_pre_hook(lambda part, inputs: (inputs[0] + 1,))


def replace_a_method(model):
    feedforward = model.stack.blocks[0].feedforward
    feedforward.forward = lambda x: 3 * x


@pytest.mark.parametrize("change", [replace_a_projection, hook_a_gate, hook_a_norm_before, replace_a_method])
def test_what_was_changed_in_a_model_counts_in_every_token(change):
    prompt = torch.randint(31, (2, 5), generator=torch.Generator().manual_seed(1))
    model = make(gate="g1")
    assert model.decode_step() is not None
    untouched = model.generate(prompt, max_new_tokens=8, temperature=0)
    change(model)
    assert model.decode_step() is None
    tokens = prompt
    with torch.no_grad():
        for _ in range(8):
            tokens = torch.cat((tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)), dim=1)
    assert not torch.equal(tokens, untouched)
    assert torch.equal(model.generate(prompt, max_new_tokens=8, temperature=0), tokens)


def test_a_model_of_another_kind_is_called():
    class Quieter(TransformerLM):
        pass

    assert Quieter(TransformerConfig(**SIZES)).decode_step() is None


def test_there_is_no_step_with_dropout_nor_under_autocast():
    model = make(torch.float32, dropout=0.1)
    assert model.decode_step() is None
    assert model.eval().decode_step() is not None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.decode_step() is None


def test_a_hook_on_every_module_is_called_for_every_token():
    model, calls = make(gate="none"), []
    handle = nn.modules.module.register_module_forward_hook(lambda part, inputs, output: calls.append(part))
    try:
        model.generate(torch.zeros(1, 3, dtype=torch.int64), max_new_tokens=4)
    finally:
        handle.remove()
    assert sum(part is model for part in calls) == 4


def test_what_is_generated_may_be_trained_on_and_written_to():
    model = make(torch.float32)
    tokens = model.generate(torch.zeros(1, 3, dtype=torch.int64), max_new_tokens=4)
    tokens[0, 0] = 1
    model(tokens).sum().backward()
    assert model.embedding.weight.grad is not None
