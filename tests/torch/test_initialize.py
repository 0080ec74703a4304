import pytest
import torch
from errors import rejects

from tidegate.config import TransformerConfig
from tidegate.torch.decoder import TransformerLM


def make(seed=None, *, dtype=None, **options):
    model = TransformerLM(
        TransformerConfig(**{"d_model": 24, "num_layers": 2, "vocab_size": 11} | options), dtype=dtype
    )
    if seed is not None:
        model.reset_parameters(seed)
    return model


def shared(*models):
    states = [model.state_dict() for model in models]
    names = set.intersection(*map(set, states))
    return {name: [state[name] for state in states] for name in names}


@pytest.mark.parametrize("init", [0.02, "fan-in", "torch"])
def test_variants_with_one_seed_share_every_weight_that_they_have_in_common(init):
    plain, bma, g1 = (make(3, init=init, gate=gate) for gate in ("none", "bma", "g1"))
    in_common = shared(plain, bma, g1)
    assert set(in_common) == set(plain.state_dict())
    assert all(torch.equal(first, other) for first, *others in in_common.values() for other in others)


@pytest.mark.parametrize(
    "options",
    [{"tie_embeddings": False}, {"positions": "learned"}, {"qk_norm": True}, {"metric": "learned"}, {"bias": True}],
    ids=str,
)
def test_options_that_add_parameters_leave_the_others_as_they_were(options):
    in_common = shared(make(3), make(3, **options))
    assert set(in_common) == set(make(3).state_dict())
    assert all(torch.equal(first, second) for first, second in in_common.values())


def test_a_seed_decides_and_another_seed_differs():
    first, again, other = make(0), make(0), make(1)
    assert all(torch.equal(a, b) for a, b in shared(first, again).values())
    drawn = [(a, b) for name, (a, b) in shared(first, other).items() if "norm" not in name]
    assert drawn
    assert not any(torch.equal(a, b) for a, b in drawn)


def test_no_two_modules_draw_the_same_numbers():
    firsts = [weight.flatten()[0].item() for name, weight in make(0).state_dict().items() if "norm" not in name]
    assert len(set(firsts)) == len(firsts)


def test_a_seed_leaves_the_global_generator_alone():
    model = make()
    before = torch.get_rng_state()
    model.reset_parameters(5)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_seed_the_global_generator_decides():
    models = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        models.append(make())
    same, other = shared(*models[:2]), shared(*models[1:])
    assert all(torch.equal(a, b) for a, b in same.values())
    assert not torch.equal(*other["embedding.weight"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_every_dtype_starts_from_the_same_numbers(dtype):
    wide = make(0, gate="g1+value:query:r2:b1", metric="learned", dtype=torch.float32)
    other = make(0, gate="g1+value:query:r2:b1", metric="learned", dtype=dtype)
    assert all(torch.equal(a.to(dtype), b) for a, b in shared(wide, other).values())


def test_gates_and_metrics_start_as_they_say_themselves():
    model = make(0, gate="output:input:b1.5:s0.5+value:query:s0", d_model=64, metric="learned")
    gates = model.stack.blocks[1].attention.attn_gate
    assert gates.output.weight.std().item() == pytest.approx(0.5, rel=0.05)
    assert torch.equal(gates.output.bias, torch.full_like(gates.output.bias, 1.5))
    assert not gates.value.weight.any()
    metric = model.stack.blocks[1].attention.metric.weight
    assert torch.equal(metric, torch.eye(16).expand_as(metric))
    assert (model.stack.norm.weight == 1).all()


@pytest.mark.parametrize("seed", [None, 4])
def test_every_parameter_starts_anew(seed):
    model = make(gate="g1+g2", bias=True, qk_norm=True, metric="diagonal", positions="learned", tie_embeddings=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    model.reset_parameters(seed)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_from_the_meta_device_equals_one_made_in_place(tied):
    config = TransformerConfig(d_model=24, num_layers=2, positions="learned", tie_embeddings=tied, gate="bma+g1")
    model = TransformerLM(config, device="meta")
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu").reset_parameters(7)
    direct = TransformerLM(config)
    direct.reset_parameters(7)
    tokens = torch.arange(10).reshape(2, 5)
    assert torch.equal(model(tokens), direct(tokens))


def test_feed_forward_layers_of_different_widths_begin_alike():
    narrow, wide = (TransformerLM(TransformerConfig(d_model=24, num_layers=2, d_ff=d_ff)) for d_ff in (7, (7, 50)))
    for model in (narrow, wide):
        model.reset_parameters(seed=3)
    for name, weight in narrow.state_dict().items():
        common = tuple(slice(size) for size in weight.shape)
        assert torch.equal(wide.state_dict()[name][common], weight), name


def deviations(init, **options):
    """Return one initial matrix of each kind, wide enough to estimate its standard deviation."""
    model = make(0, init=init, d_model=128, d_ff=512, vocab_size=256, num_layers=2, gate="none", **options)
    block = model.stack.blocks[0]
    return {
        "inward": block.attention.q_proj.weight,
        "outward": block.attention.o_proj.weight,
        "up": block.feedforward.up_proj.weight,
        "down": block.feedforward.down_proj.weight,
        "embedding": model.embedding.weight,
    }


@pytest.mark.parametrize(
    ("init", "expected"),
    {
        0.02: {"inward": 0.02, "outward": 0.01, "up": 0.02, "down": 0.01, "embedding": 0.02},
        0.1: {"inward": 0.1, "outward": 0.05, "up": 0.1, "down": 0.05, "embedding": 0.1},
        "fan-in": {
            "inward": 128**-0.5,
            "outward": 128**-0.5 / 2,
            "up": 128**-0.5,
            "down": 512**-0.5 / 2,
            "embedding": 0.02,
        },
        "torch": {
            "inward": 384**-0.5,
            "outward": 384**-0.5,
            "up": 384**-0.5,
            "down": 1536**-0.5,
            "embedding": 0.02,
        },
    }.items(),
)
def test_every_start_has_the_deviations_that_it_names(init, expected):
    for name, weight in deviations(init).items():
        assert weight.std().item() == pytest.approx(expected[name], rel=0.03), name
        is_uniform = init == "torch" and name != "embedding"
        assert (weight.abs().max() < 2 * expected[name]) == is_uniform


@pytest.mark.parametrize("init", [0, -1.0, True, "fan_in", None, float("inf")])
def test_what_is_no_start_is_refused(init):
    with rejects("init"):
        make(init=init)
