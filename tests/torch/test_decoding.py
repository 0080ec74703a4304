"""The step of one position against a call of the model; tests/torch/test_generate.py holds it to recomputation."""

import pytest
import torch
from closeness import assert_close
from covers import axis, over
from errors import rejects
from torch import nn

from tidegate import PRESETS
from tidegate.config import Rotary, TransformerConfig
from tidegate.torch import decoding
from tidegate.torch.decoder import TransformerLM
from tidegate.torch.decoding import pays_to_pack
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


def read_both(model, *, mask=None, positions=None, packed_rows=None):
    """The logits of one more token of three rows, by the step and by the model, each after caches of its own."""
    tokens = torch.randint(31, (3, 7), generator=torch.Generator().manual_seed(1))
    step, both = model.decode_step(packed_rows), []
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


packs = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of PyTorch packs no weights")


@packs
@pytest.mark.parametrize("build", BUILDS.values(), ids=list(BUILDS))
@pytest.mark.parametrize("rows", [3, 8])
def test_the_step_with_packed_weights_gives_the_logits_of_the_model(build, rows):
    stepped, called = read_both(make(torch.float32, gate="sink+g1", **build), packed_rows=rows)
    assert_close(stepped, called, what="forward")


@packs
def test_many_tokens_of_a_few_rows_take_packed_weights(monkeypatch):
    model = make(torch.float32)
    assert pays_to_pack(model, rows=2, steps=48)
    assert not pays_to_pack(model, rows=1, steps=48)
    assert not pays_to_pack(model, rows=2, steps=47)
    assert not pays_to_pack(model, rows=17, steps=48)
    assert not pays_to_pack(make(torch.float64), rows=2, steps=48)
    assert not pays_to_pack(make(torch.bfloat16), rows=2, steps=48)
    monkeypatch.setattr(decoding, "_BYTES_TO_PACK", 1000)
    assert not pays_to_pack(model, rows=2, steps=48)


@packs
def test_packed_weights_are_taken_anew_for_each_text():
    model = make(torch.float32, gate="bma")
    prompt = torch.randint(31, (2, 5), generator=torch.Generator().manual_seed(1))
    first = model.generate(prompt, max_new_tokens=60, temperature=0)
    assert torch.equal(model.generate(prompt, max_new_tokens=30, temperature=0), first[:, :35])
    with torch.no_grad():
        model.stack.blocks[0].attention.o_proj.weight.neg_()
    assert not torch.equal(model.generate(prompt, max_new_tokens=60, temperature=0), first)


@pytest.mark.parametrize("build", BUILDS.values(), ids=list(BUILDS))
def test_the_step_takes_masks_and_positions(build):
    mask = torch.ones(3, 1, 1, 7, dtype=torch.bool)
    mask[1, ..., :5] = False
    model = make(gate="sink+g1", **build)
    stepped, called = read_both(model, mask=mask, positions=torch.tensor([[6], [1], [9]]))
    assert_close(stepped, called, what="forward")
    assert not torch.allclose(stepped, read_both(model)[0])


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


def drop_in_one_place(model):
    model.eval().stack.blocks[0].dropout.p = 1.0
    model.stack.blocks[0].dropout.train()


CHANGES = [
    replace_a_projection,
    hook_a_gate,
    hook_a_norm_before,
    replace_a_method,
    drop_in_one_place,
]


@pytest.mark.parametrize("change", CHANGES)
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


def test_a_head_with_a_bias_has_it_in_every_token():
    model = make(tie_embeddings=False)
    model.head = nn.Linear(24, 31, bias=True, dtype=torch.float64)
    stepped, called = read_both(model)
    assert_close(stepped, called, what="forward")


def test_a_forward_that_was_changed_for_all_layers_is_called(monkeypatch):
    model = make()
    monkeypatch.setattr(nn.RMSNorm, "forward", lambda self, x: x)
    assert model.decode_step() is None


def test_a_layer_that_rotates_by_other_angles_is_called():
    model = make()
    model.stack.blocks[1].attention.rotary = Rotary(base=10.0)
    assert model.decode_step() is None


def test_an_embedding_that_limits_its_norms_is_called():
    model = make()
    model.embedding.max_norm = 0.5
    assert model.decode_step() is None


def test_there_is_no_step_inside_a_transform_nor_for_a_layer_that_sees_the_future():
    model = make()
    found = []
    torch.func.vmap(lambda x: found.append(model.decode_step()) or x)(torch.zeros(2))
    assert found == [None]
    model.stack.blocks[0].attention.causal = False
    assert model.decode_step() is None


def test_a_step_that_was_kept_follows_its_model():
    model = make(gate="sink+g1")
    step, caches = model.decode_step(), model.new_caches(2)
    assert step is not None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
        token = torch.tensor([[3], [4]])
        expected = model(token, caches=model.new_caches(2))[:, 0]
    assert_close(step(token, caches=caches), expected, what="forward")


@pytest.mark.parametrize("max_length", [8, None])
def test_the_model_goes_on_where_the_step_has_filled_the_caches(max_length):
    model, tokens = make(gate="bma"), torch.tensor([[3, 4, 5]])
    caches, step = model.new_caches(max_length), model.decode_step()
    assert step is not None
    step(tokens[:, :1], caches=caches)
    with torch.no_grad():
        assert_close(model(tokens[:, 1:], caches=caches), model(tokens)[:, 1:], what="forward")
    if max_length is None:
        model(tokens[:, :1], caches=caches).sum().backward()
        assert model.embedding.weight.grad is not None


def test_the_step_refuses_what_the_model_refuses():
    model, other, token = make(), make(), torch.tensor([[3]])
    step = model.decode_step()
    assert step is not None
    with pytest.raises(ValueError, match=r"tokens must have shape \(batch, 1\)"):
        step(torch.tensor([[3, 4]]), caches=model.new_caches())
    with rejects("caches"):
        step(token, caches=model.new_caches()[:1])
    with rejects("tokens"):
        step(torch.tensor([[31]]), caches=model.new_caches())
    theirs = other.new_caches()
    with torch.no_grad():
        other(token, caches=theirs)
    with rejects("cache", hint="another layer"):
        step(token, caches=theirs)


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
