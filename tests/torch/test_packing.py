import pytest
import torch
from closeness import assert_close
from torch import nn

from tidegate.config import TransformerConfig
from tidegate.torch.decoder import TransformerLM
from tidegate.torch.gate import AttentionGate
from tidegate.torch.generate import pack, pays_to_pack

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this build of PyTorch packs no weights"
)

SIZES = {"vocab_size": 31, "d_model": 24, "num_layers": 2, "max_length": 64}
BUILDS = {
    "as it comes": {},
    "everything": {"bias": True, "qk_norm": True, "metric": "learned", "num_kv_heads": 2, "window": 4},
    "old style": {
        "norm": "layer",
        "feedforward": "gelu",
        "positions": "learned",
        "bias": True,
        "tie_embeddings": False,
    },
}


def make(dtype=torch.float32, **options):
    model = TransformerLM(TransformerConfig(**SIZES | options), dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def read_on(model, packed):
    """Yield the next logits of three rows, from a model and from its packed copy."""
    tokens = torch.randint(31, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(3, 1, 1, 7, dtype=torch.bool)
    mask[1, ..., :5] = False
    with torch.no_grad():
        for reader in (model, packed):
            caches = model.new_caches(7)
            model(tokens[:, :6], caches=caches, mask=mask[..., :6])
            yield reader(tokens[:, 6:], caches=caches, mask=mask, positions=torch.tensor([[6], [1], [9]]))


@pytest.mark.parametrize("build", BUILDS.values(), ids=list(BUILDS))
@pytest.mark.parametrize("rows", [3, 8])
def test_a_packed_model_gives_the_logits_of_the_model(build, rows):
    model = make(gate="sink+g1", **build)
    names = list(model.state_dict())
    assert_close(*read_on(model, pack(model, rows)), what="forward")
    assert list(model.state_dict()) == names


def test_many_tokens_of_a_few_rows_take_packed_weights(monkeypatch):
    model = make()
    assert pays_to_pack(model, rows=2, steps=48)
    assert not pays_to_pack(model, rows=1, steps=48)
    assert not pays_to_pack(model, rows=2, steps=47)
    assert not pays_to_pack(model, rows=17, steps=48)
    assert not pays_to_pack(make(torch.float64), rows=2, steps=48)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not pays_to_pack(model, rows=2, steps=48)
    monkeypatch.setattr("tidegate.torch.generate._MOST_BYTES", 1000)
    assert not pays_to_pack(model, rows=2, steps=48)


def test_weights_are_packed_again_for_each_text():
    model = make(gate="bma")
    prompt = torch.randint(31, (2, 5), generator=torch.Generator().manual_seed(1))
    first = model.generate(prompt, max_new_tokens=60, temperature=0)
    assert torch.equal(model.generate(prompt, max_new_tokens=30, temperature=0), first[:, :35])
    with torch.no_grad():
        model.stack.blocks[0].attention.o_proj.weight.neg_()
    assert not torch.equal(model.generate(prompt, max_new_tokens=60, temperature=0), first)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def replace_a_projection(model):
    model.stack.blocks[1].attention.v_proj = Doubled(24, 24, bias=False)


def hook_a_gate(model):
    gate = next(part for part in model.modules() if isinstance(part, AttentionGate))
    gate.register_forward_hook(lambda part, inputs, values: 0.5 * values)


def hook_a_projection(model):
    model.stack.blocks[0].attention.q_proj.register_forward_pre_hook(lambda part, inputs: (inputs[0] + 1,))


def replace_a_method(model):
    model.stack.blocks[0].feedforward.down_proj.forward = lambda x: 3 * x[..., :24]


@pytest.mark.parametrize("change", [replace_a_projection, hook_a_gate, hook_a_projection, replace_a_method])
def test_a_packed_model_keeps_what_was_changed_in_the_model(change):
    model = make(gate="g1")
    untouched, _ = read_on(model, model)
    change(model)
    expected, found = read_on(model, pack(model, 3))
    assert not torch.allclose(expected, untouched)
    assert_close(found, expected, what="forward")
