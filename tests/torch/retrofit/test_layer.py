"""Gates in the attention of transformers compute the same as in ours."""

import threading

import pytest
import torch
from closeness import assert_close
from layers import WITH_MATRICES
from retrofit_models import adapt, inputs_of, logits, merge_adapters, stir, tiny

from tidegate.tensors.rotary import Rotary
from tidegate.torch import GatedAttention, gate_parameters
from tidegate.torch.retrofit import add_gates, freeze_all_but_gates, remove_gates
from tidegate.torch.retrofit.layer import gated_layers

GATES = [gate for gate in WITH_MATRICES if not (gate.reads == "value" and gate.site in ("query", "key"))]
SHARED = ["output:input:shared-group", "bma", "value:query:r3", "output:query:shared-layer:w4", "dense:input:r2"]


def attention_call(model, length=6):
    """Return the first layer's attention as a function of its input, causal and with rotary positions."""
    attention, positions = model.model.layers[0].self_attn, torch.arange(length)[None]
    embedding = model.model.rotary_emb(torch.empty(0), positions)
    return lambda x: attention(x, position_embeddings=embedding, attention_mask=None)[0]


def own_layer(model, gate):
    """Return our layer with the weights and gates of the first layer's attention."""
    attention = model.model.layers[0].self_attn
    own = GatedAttention(32, 4, num_kv_heads=2, gate=gate, rope=Rotary(base=10000.0))
    own.load_state_dict(attention.state_dict())
    return own


def pair(gate):
    model = tiny("llama", num_hidden_layers=1)
    add_gates(model, gate, activation=None)
    stir(model)
    return model, own_layer(model, gate)


@pytest.mark.parametrize("gate", [*map(str, GATES), *SHARED, "bma+g1+g3+g4+g5", "bma-query+vga+dense:output"])
def test_a_gate_in_a_llama_is_the_gate_of_our_layer(gate):
    model, own = pair(gate)
    results = []
    for function in (attention_call(model), own):
        torch.manual_seed(5)
        x = torch.randn(2, 6, 32, requires_grad=True)
        y = function(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), x)))
    assert_close(results[0][0], results[1][0], what="forward")
    assert_close(results[0][1], results[1][1], what="gradient")


@pytest.mark.parametrize("gate", ["bma", "bma-query", "g2", "vga", "g5", "g1", "dense:output"])
@pytest.mark.parametrize("order", ["gates first", "adapters first"])
def test_gates_read_and_gate_what_an_adapter_adds(gate, order):
    names = ("q_proj", "v_proj", "o_proj")
    model = tiny("llama")
    if order == "adapters first":
        adapt(model, names)
    add_gates(model, gate)
    stir(model)
    if order == "gates first":
        adapt(model, names)
    adapted = logits(model)
    # Compare with adapters that are merged into the projections before gates are added.
    folded = tiny("llama")
    merge_adapters(adapt(folded, names))
    add_gates(folded, gate)
    stir(folded)
    assert_close(adapted, logits(folded), what="forward")
    merge_adapters(model)
    assert_close(logits(model), adapted, what="forward")
    remove_gates(model)
    assert not torch.allclose(logits(model), adapted, atol=1e-3)


def test_a_gate_that_reads_the_query_calls_its_projection_once_and_adds_one_key():
    model = tiny("llama")
    names = set(model.state_dict())
    add_gates(model, "bma")
    added = {f"model.layers.{index}.self_attn.attn_gate.value.weight" for index in range(2)}
    assert set(model.state_dict()) == names | added
    calls = []
    for layer in model.model.layers:
        layer.self_attn.q_proj.register_forward_hook(lambda *_: calls.append(1))
    logits(model)
    assert len(calls) == 2


def test_gradient_checkpointing_gives_the_same_gradients():
    gradients = []
    for checkpointing in (False, True):
        model = tiny("llama").train()
        add_gates(model, "bma+g1+g5")
        stir(model)
        freeze_all_but_gates(model)
        if checkpointing:
            model.gradient_checkpointing_enable()
        inputs = inputs_of(model)
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        gradients.append([parameter.grad for parameter in gate_parameters(model)])
    assert all(gradient.abs().max() > 0 for gradient in gradients[0])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("gate", ["bma", "bma-query", "g5"])
def test_nothing_of_a_call_that_fails_is_kept(gate):
    model = tiny("llama")
    add_gates(model, gate)

    def fail(*_call):
        raise KeyError("x")

    model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        logits(model)
    assert [layer.call.reads for layer in gated_layers(model)] == [None, None]


def test_a_call_that_another_thread_makes_meanwhile_changes_nothing():
    model = tiny("llama")
    add_gates(model, "bma+g5")
    stir(model)
    expected, inputs = logits(model), inputs_of(model, length=9)
    attention = model.model.layers[0].self_attn
    meanwhile = threading.Thread(target=logits, args=(model, inputs))

    def interrupt(*_):
        # Between the query's projection and the value's, and only once.
        if threading.current_thread() is not meanwhile:
            meanwhile.start()
            meanwhile.join()

    handle = attention.k_proj.register_forward_hook(interrupt)
    assert torch.equal(logits(model), expected)
    handle.remove()
    assert not meanwhile.is_alive()


@pytest.mark.filterwarnings("ignore")
def test_tracing_a_gated_model_is_rejected():
    model = tiny("llama")
    add_gates(model, "bma")
    with pytest.raises(RuntimeError, match="jit"):
        torch.jit.trace(model, inputs_of(model)["input_ids"], strict=False)
