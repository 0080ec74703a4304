import pytest
import torch
from closeness import assert_close
from covers import axis, over
from errors import rejects

from tidegate import PRESETS, Gates
from tidegate.config import TransformerConfig
from tidegate.torch.cache import KVCache
from tidegate.torch.decoder import TransformerLM

EVERY_GATE = ["none", *PRESETS]
POSITIONS = ["rotary", "learned", "none"]
PRESET = axis(EVERY_GATE, "bma", "g1")


def make(*, dtype=torch.float64, **options):
    """Return a small model with large matrices, so that every part has an effect."""
    sizes = {"vocab_size": 11, "d_model": 24, "num_layers": 2, "num_heads": 4, "max_length": 128}
    model = TransformerLM(TransformerConfig(**sizes | options), dtype=dtype)
    model.reset_parameters(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.ndim > 1 else 1)
    return model


def sample(batch, length, *, seed=1):
    return torch.randint(11, (batch, length), generator=torch.Generator().manual_seed(seed))


@over(gate=PRESET, feedforward=axis(["swiglu", "gelu"]), tied=axis([True, False]))
def test_parameters_are_as_many_as_the_closed_form_says(gate, feedforward, tied):
    d, h, H, G, f, V, T, n = 24, 6, 4, 2, 40, 11, 16, 3
    sizes = {"d_model": d, "num_heads": H, "num_kv_heads": G, "head_dim": h}
    options = {"positions": "learned", "max_length": T, "bias": True, "norm": "layer", "qk_norm": True}
    model = make(gate=gate, num_layers=n, d_ff=f, feedforward=feedforward, tie_embeddings=tied, **sizes, **options)
    attention = 2 * d * H * h + 2 * d * G * h + H * h + 2 * G * h + d + 2 * h
    inner = (3 if feedforward == "swiglu" else 2) * d * f + (2 if feedforward == "swiglu" else 1) * f + d
    block = attention + inner + 2 * 2 * d + Gates.parse(gate).num_parameters(**sizes)
    without_embeddings = n * block + 2 * d + (0 if tied else V * d)
    assert model.num_parameters(embeddings=False) == without_embeddings
    assert model.num_parameters() == without_embeddings + V * d + T * d
    assert model.num_parameters() == sum(parameter.numel() for parameter in set(model.parameters()))


@pytest.mark.parametrize("window", [None, 1, 5, 16, 99])
def test_flops_default_to_the_mean_number_of_keys(window):
    model = make(gate="bma", positions="learned", max_length=16, window=window, d_ff=40)
    keys = sum(min(i + 1, window or 16) for i in range(16)) / 16
    matrices = 2 * (4 * 24 * 24 + 4 * 6 * 6 + 3 * 24 * 40) + 11 * 24
    assert model.flops_per_token() == pytest.approx(2 * matrices + 2 * 4 * 24 * keys)
    assert model.flops_per_token(7) == 2 * matrices + 2 * 4 * 24 * 7


@pytest.mark.parametrize("positions", POSITIONS)
def test_packed_documents_equal_the_documents_one_by_one(positions):
    model = make(positions=positions, gate="bma+g1")
    tokens = sample(2, 10)
    ids = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1, 7], [3, 3, 3, 3, 2, 2, 2, 2, 2, 2]])
    for row, lengths in enumerate(([4, 5, 1], [4, 6])):
        alone = torch.cat([model(part) for part in tokens[row : row + 1].split(lengths, dim=1)], dim=1)
        assert_close(model(tokens, documents=ids)[row : row + 1], alone)
    assert_close(model(tokens[:1], documents=torch.tensor([0, 4, 9, 10])), model(tokens, documents=ids)[:1])


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("checkpoint", [False, True])
def test_the_model_compiles_whole(checkpoint):
    model = make(dtype=torch.float32, num_layers=1, checkpoint_blocks=checkpoint, gate="bma+g1")
    tokens = sample(2, 9)
    # This tests the capture of both graphs; the tests of the layer include code generation.
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(compiled(tokens), model(tokens))
    actual = torch.autograd.grad(compiled(tokens).square().sum(), list(model.parameters()))
    expected = torch.autograd.grad(model(tokens).square().sum(), list(model.parameters()))
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, what="gradient")


def test_the_names_of_the_weights_stay():
    names = [name.removeprefix("stack.blocks.0.") for name in make(num_layers=1, gate="bma").state_dict()]
    assert names == [
        "embedding.weight",
        "attention_norm.weight",
        "attention.q_proj.weight",
        "attention.k_proj.weight",
        "attention.v_proj.weight",
        "attention.o_proj.weight",
        "attention.attn_gate.value.weight",
        "feedforward_norm.weight",
        "feedforward.gate_proj.weight",
        "feedforward.up_proj.weight",
        "feedforward.down_proj.weight",
        "stack.norm.weight",
    ]
    others = make(positions="learned", tie_embeddings=False).state_dict()
    assert {"position_embedding.weight", "head.weight"} <= set(others)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"tokens": torch.zeros(2, 3)}, "tokens"),
        ({"tokens": torch.zeros(3, dtype=torch.int64)}, "tokens"),
        ({"tokens": sample(2, 3), "positions": torch.arange(2)}, "positions"),
        ({"tokens": sample(1, 3), "num_logits": 0}, "num_logits"),
        ({"tokens": sample(1, 17)}, "tokens"),
        ({"tokens": sample(2, 3), "documents": torch.tensor([0, 3])}, "documents"),
        ({"tokens": sample(2, 3), "caches": []}, "caches"),
    ],
)
def test_an_argument_that_does_not_fit_is_rejected_by_name(arguments, field):
    with rejects(field):
        make(positions="learned", max_length=16)(**arguments)


def test_learned_positions_end_where_their_table_ends_with_a_cache_too():
    model = make(positions="learned", max_length=16)
    caches = model.new_caches()
    model(sample(1, 16), caches=caches)
    with rejects("tokens", hint="positions='rotary'"):
        model(sample(1, 1), caches=caches)
    assert make(positions="rotary", max_length=16)(sample(1, 17)).shape == (1, 17, 11)


@pytest.mark.parametrize("token", [-1, 11, 5000])
def test_tokens_outside_the_vocabulary_are_rejected_by_value(token):
    tokens = sample(2, 3)
    tokens[1, 2] = token
    with rejects("tokens", hint="tokenizer") as caught:
        make()(tokens)
    assert caught.value.got == token


@pytest.mark.parametrize("position", [-1, 16])
def test_positions_outside_the_table_are_rejected_by_value(position):
    with rejects("positions", hint="Shorten tokens") as caught:
        make(positions="learned", max_length=16)(sample(1, 1), positions=torch.tensor([position]))
    assert caught.value.got == position


@pytest.mark.parametrize("positions", POSITIONS)
def test_one_cache_in_place_of_a_list_is_refused(positions):
    with pytest.raises(TypeError, match=r"^caches must be a list"):
        make(positions=positions)(sample(1, 1), caches=KVCache())
