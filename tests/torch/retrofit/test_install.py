import pytest
import torch
import transformers
from covers import axis, over
from errors import rejects
from layers import WITH_MATRICES
from retrofit_models import CAUSAL, FAMILIES, GROUPED, inputs_of, logits, stir, tiny

from tidegate.gate import Gate
from tidegate.torch import gate_parameters
from tidegate.torch.gate import AttentionGate
from tidegate.torch.retrofit import RetrofitReport, add_gates, load_gates, remove_gates, save_gates

families = pytest.mark.parametrize("family", FAMILIES)
ALL_SITES = "bma+g1+g3+g4+g5"


def under_both(model):
    """Return the logits by implementation, gated if the model has gates."""
    ours = any(True for _ in gate_parameters(model))
    found = {}
    for stock in ("eager", "sdpa"):
        model.set_attn_implementation(f"tidegate_{stock}" if ours else stock)
        found[stock] = logits(model)
    return found


def gates_that_fit(family):
    """Return all gates except sinks and those that read a value before it is projected; GPT-2 has one projection."""
    late = [] if family == "gpt2" else ["query", "key"]
    return [gate for gate in WITH_MATRICES if not (gate.reads == "value" and gate.site in late)]


@over(
    family=axis(list(FAMILIES), "llama", "gpt2", "bert"),
    dtype=axis([torch.float32, torch.bfloat16], torch.bfloat16),
    gate=axis(["g1", ALL_SITES], ALL_SITES),
)
def test_added_gates_leave_every_bit_of_the_logits(family, dtype, gate):
    model = tiny(family, dtype=dtype)
    before = under_both(model)
    model.set_attn_implementation("sdpa")
    report = add_gates(model, gate)
    after = under_both(model)
    assert report.bitwise_equal
    assert len(report.layers) == 2
    assert {parameter.dtype for parameter in gate_parameters(model)} == {dtype}
    assert all(torch.equal(after[stock], before[stock]) for stock in before)


@pytest.mark.parametrize(("family", "activation"), [("llama", "twosigmoid"), ("gpt2", "tanh1"), ("bert", "twosigmoid")])
def test_every_gate_but_sinks_can_be_added_and_taken_out(family, activation):
    model = tiny(family, num_hidden_layers=1)
    before = logits(model)
    for gate in gates_that_fit(family):
        assert add_gates(model, gate, activation).bitwise_equal, gate
        stir(model)
        assert not torch.equal(logits(model), before), gate
        remove_gates(model)
        assert torch.equal(logits(model), before), gate


@pytest.mark.parametrize(
    ("gate", "hint"),
    [
        ("off-by-one+g1", "has no gradient"),
        ("output:input:shuffled", "nothing"),
        ("output:output:gelu:replace", "nothing"),
    ],
)
def test_sinks_and_controls_cannot_be_added(gate, hint):
    model = tiny("llama", num_hidden_layers=1)
    before = logits(model)
    with rejects("gate", hint=hint):
        add_gates(model, gate, None)
    assert torch.equal(logits(model), before)


@families
def test_removed_gates_leave_the_model_as_it_was(family):
    model = tiny(family, implementation="eager")
    before, names = logits(model), set(model.state_dict())
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    add_gates(model, ALL_SITES)
    stir(model)
    remove_gates(model)
    assert torch.equal(logits(model), before)
    assert set(model.state_dict()) == names
    assert model.config._attn_implementation == "eager"
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks


STATIC = {"cache_implementation": "static", "disable_compile": True}


@over(family=axis(CAUSAL, "llama", "mistral"), gate=axis(["g1", "bma"], "bma"))
def test_generation_is_the_same_with_a_cache_a_static_cache_and_none(family, gate):
    model = tiny(family)
    add_gates(model, gate)
    stir(model, std=1.0)
    prompt = inputs_of(model, length=5)
    caches = ({"use_cache": True}, {"use_cache": False}, *((STATIC,) if family == "llama" else ()))
    first, *others = (
        model.generate(**prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False, **cache) for cache in caches
    )
    assert first.shape == (2, 11)
    assert all(torch.equal(each, first) for each in others)


def test_the_report_says_what_was_done_and_seen():
    report = add_gates(tiny("llama"), "g1")
    assert report == RetrofitReport(
        model="LlamaForCausalLM",
        gates="output:input:twosigmoid:s0",
        layers=("model.layers.0.self_attn", "model.layers.1.self_attn"),
        num_parameters=2 * 32 * 32,
        implementations=("eager", "sdpa"),
        dtype="float32",
        bitwise_equal=True,
        largest_change=0.0,
    )


@pytest.mark.parametrize("activation", ["sigmoid", None])
def test_gates_that_do_not_start_at_one_are_reported_to_change_the_logits(activation):
    model = tiny("llama")
    before = under_both(model)
    report = add_gates(model, "g1", activation)
    after = under_both(model)
    assert not report.bitwise_equal
    assert report.largest_change > 0
    assert not torch.equal(after["sdpa"], before["sdpa"])
    assert "do not start at the identity" in str(report)


@pytest.mark.parametrize(
    ("gate", "activation", "count"),
    [("output:input:b3", "tanh1", 2), ("g2", "tanh1", 1), (Gate(site="value", reads="input", op="add"), "silu", 1)],
)
def test_a_neutral_activation_starts_matrix_and_bias_at_zero(gate, activation, count):
    model = tiny("llama")
    assert add_gates(model, gate, activation).bitwise_equal
    parameters = list(gate_parameters(model))
    assert len(parameters) == 2 * count
    assert all(parameter.requires_grad and not parameter.any() for parameter in parameters)


def test_layers_are_chosen_by_path_or_number_and_others_can_follow():
    model = tiny("llama")
    before = logits(model)
    assert add_gates(model, "g1", layers=["model.layers.1.self_attn"]).layers == ("model.layers.1.self_attn",)
    assert torch.equal(logits(model), before)
    stir(model)
    gated = logits(model)
    assert not torch.equal(gated, before)
    assert add_gates(model, "bma", layers=[0]).bitwise_equal
    assert torch.equal(logits(model), gated)
    with rejects("model", hint="call remove_gates(model) first"):
        add_gates(model, "g2")
    remove_gates(model)
    assert torch.equal(logits(model), before)
    for layers in ([2], [], [True], [0, -1], ["layers.0"]):
        with rejects("layers", hint="model.layers.0.self_attn"):
            add_gates(model, layers=layers)
    for layers in (1, "1"):
        with pytest.raises(TypeError):
            add_gates(model, layers=layers)


def test_modes_gradients_and_implementation_are_left_alone():
    model = tiny("llama", implementation="eager")
    model.model.layers[0].train()
    model.lm_head.requires_grad_(False)
    modes = {module: module.training for module in model.modules()}
    wanted = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    add_gates(model, "g2")
    gates = [layer.self_attn.attn_gate for layer in model.model.layers]
    assert [{module.training for module in gate.modules()} for gate in gates] == [{True}, {False}]
    remove_gates(model)
    assert {module: module.training for module in model.modules()} == modes
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == wanted
    assert model.config._attn_implementation == "eager"


def test_an_implementation_that_the_model_cannot_run_with_is_left_out():
    # Fused attention has no cap on the scores.
    config = transformers.Gemma2Config(**{**GROUPED, "head_dim": 8})
    model = transformers.Gemma2ForCausalLM(config).eval()
    model.set_attn_implementation("eager")
    before = logits(model)
    assert add_gates(model).implementations == ("eager",)
    assert torch.equal(logits(model), before)


def test_a_model_that_depends_on_the_name_of_its_implementation_keeps_it():
    # In eager attention under its stock name, this model widens its scores.
    model = tiny("gpt2", dtype=torch.bfloat16, reorder_and_upcast_attn=True)
    before = logits(model)
    assert add_gates(model, "g1").implementations == ("eager", "sdpa")
    assert torch.equal(logits(model), before)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_model_in_float64_takes_gates(implementation):
    model = tiny("llama", dtype=torch.float64, implementation=implementation)
    before = logits(model)
    assert add_gates(model, ALL_SITES).bitwise_equal
    # In float64, eager attention is nan for queries without keys, as in the first row's padding.
    assert before[0].isnan().any() == (implementation == "eager")
    assert torch.equal(logits(model).isnan(), before.isnan())
    assert torch.equal(logits(model)[1], before[1])


@pytest.mark.parametrize("failure", ["changed outputs", "error"])
def test_a_model_whose_probe_fails_stays_as_it_was(failure, monkeypatch):
    model = tiny("llama")
    before, names = logits(model), set(model.state_dict())

    def fail(self, source):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        if failure == "error":
            patch.setattr(AttentionGate, "forward", fail)
            expected = pytest.raises(RuntimeError, match="memory")
        else:
            patch.setattr(model.lm_head, "forward", lambda x: x @ model.lm_head.weight.T + torch.rand(()))
            expected = rejects("model", hint="outputs changed")
        with expected:
            add_gates(model, "bma+g1")
    assert set(model.state_dict()) == names
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(logits(model), before)
    assert add_gates(model, "g2").bitwise_equal


def test_models_of_one_configuration_are_gated_each_by_itself():
    config = tiny("llama").config
    first, second, third = (transformers.LlamaForCausalLM(config).eval() for _ in range(3))
    add_gates(first, "g1")
    add_gates(second, "g1")
    stir(second)
    gated, plain = logits(second), logits(third)
    remove_gates(first)
    assert torch.equal(logits(second), gated)
    assert torch.equal(logits(third), plain)
    assert [model.config._attn_implementation for model in (first, second, third)] == ["sdpa", "tidegate_sdpa", "sdpa"]


@pytest.mark.parametrize("gate", ["g1", "bma+g5"])
def test_the_global_random_state_is_left_alone(gate, tmp_path):
    model, again = tiny("llama"), tiny("llama")
    torch.manual_seed(11)
    before = torch.get_rng_state()
    add_gates(model, gate, activation=None)
    drawn = [weight.clone() for weight in gate_parameters(model)]
    assert torch.equal(torch.get_rng_state(), before)
    save_gates(model, tmp_path)
    load_gates(again, tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    remove_gates(model)
    with rejects("layers"):
        add_gates(model, gate, layers=[7])
    assert torch.equal(torch.get_rng_state(), before)
    # Initial values still depend on the random state.
    add_gates(model, gate, activation=None)
    assert all(torch.equal(a, b) for a, b in zip(gate_parameters(model), drawn, strict=True))
    remove_gates(model)
    torch.manual_seed(12)
    add_gates(model, gate, activation=None)
    assert not all(torch.equal(a, b) for a, b in zip(gate_parameters(model), drawn, strict=True))
