import copy
import gc
import pickle
import threading
import weakref
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
from closeness import assert_close
from errors import rejects
from observed import Attention, qkv
from torch import nn
from torch.nn import functional as F

from tidegate.config import TransformerConfig
from tidegate.torch import GatedAttention, TransformerLM
from tidegate.torch.observing.sums import RunningGate, RunningRank
from tidegate.torch.observing.watcher import observe

TOKENS = torch.randint(40, (3, 9), generator=torch.Generator().manual_seed(0))


def language_model(gate="bma+g1", dtype=torch.float64, **options):
    torch.manual_seed(0)
    config = {"vocab_size": 40, "d_model": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, **options}
    model = TransformerLM(TransformerConfig(gate=gate, **config)).to(dtype)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "embedding" not in name:
            parameter.data.mul_(8)
    return model


@torch.no_grad()
def test_gates_are_summarized_by_site():
    model = language_model("value:query+output:input:head+dense:input:twosigmoid")
    _, traces = model.trace(TOKENS)
    with observe(model) as watcher:
        model(TOKENS)
    for layer, trace in zip(watcher.observation().layers, traces, strict=True):
        assert set(layer.gates) == {"value", "output", "dense"}
        assert [len(layer.gates[site].mean) for site in ("value", "output", "dense")] == [2, 4, 1]
        for site, gate in layer.gates.items():
            values = trace.gates[site].unsqueeze(-2) if site == "dense" else trace.gates[site]
            sums = RunningGate("twosigmoid" if site == "dense" else "sigmoid")
            sums.add(values.flatten(0, 1))
            for name, expected in asdict(sums.summary()).items():
                assert_close(getattr(gate, name), expected)


@torch.no_grad()
def test_padding_is_left_out_of_gates_and_the_stream():
    layer = GatedAttention(16, 4, gate="bma+g1", dtype=torch.float64)
    model = nn.ModuleDict({"blocks": nn.ModuleList([_Block(layer)])})
    x = torch.randn(2, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    real = torch.arange(6) >= torch.tensor([[3], [0]])
    with observe(model) as watcher:
        y = model["blocks"][0](x, mask=real[:, None, None])
    (found,) = watcher.observation().layers
    _, trace = layer.trace(x, mask=real[:, None, None])
    for site in ("value", "output"):
        expected = trace.gates[site][real].mean(dim=(0, 2))
        assert_close(torch.tensor(found.gates[site].mean, dtype=torch.float64), expected)
    stream = RunningRank()
    stream.add(y[real])
    assert found.residual.largest == stream.largest
    assert_close(found.residual.effective_rank, stream.effective_rank())


class _Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x, **options):
        return x + self.attention(x, **options)


def test_two_batches_are_one_twice_as_large():
    model = language_model()
    more = torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(1))
    with observe(model, heat=True) as watcher:
        model(TOKENS)
        model(more)
    apart = watcher.observation()
    with observe(model, heat=True) as watcher:
        model(torch.cat((TOKENS, more)))
    together = watcher.observation()
    assert (apart.num_batches, together.num_batches) == (2, 1)
    for one, other in zip(apart.layers, together.layers, strict=True):
        assert one.positions == other.positions
        for statistic in one.heads:
            for mine, theirs in zip(one.heads[statistic], other.heads[statistic], strict=True):
                assert (mine.count, mine.histogram) == (theirs.count, theirs.histogram)
                assert_close(
                    [mine.mean, mine.std, mine.low, mine.high], [theirs.mean, theirs.std, theirs.low, theirs.high]
                )
            assert_close(one.by_position[statistic], other.by_position[statistic])
        for site in one.gates:
            assert_close(one.gates[site].mean, other.gates[site].mean)
            assert_close(one.gates[site].token_spread, other.gates[site].token_spread)
        assert_close(one.residual.effective_rank, other.residual.effective_rank, what="finite difference")


def held_by(watcher):
    """Bytes of all tensors that a watcher keeps alive, without those of modules."""
    seen, waiting, total = set(), [watcher], 0
    while waiting:
        thing = waiting.pop()
        # Modules, classes and functions can be called; sums cannot.
        if id(thing) in seen or callable(thing):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            total += thing.untyped_storage().nbytes()
        else:
            waiting.extend(gc.get_referents(thing))
    return total


def test_memory_does_not_grow_with_the_number_of_batches():
    model = language_model()
    sizes = []
    with observe(model, heat=True) as watcher:
        for batch in range(12):
            model(TOKENS)
            if batch in (2, 11):
                sizes.append(held_by(watcher))
    assert sizes[0] == sizes[1] > 0


MODES = {
    "gradients": nullcontext,
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": partial(torch.autocast, "cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_observing_changes_nothing(mode, dtype):
    model = language_model(dtype=dtype)
    with MODES[mode]():
        expected = model(TOKENS)
        with observe(model, heat=True) as watcher:
            actual = model(TOKENS)
    assert torch.equal(actual, expected)
    assert actual.requires_grad == expected.requires_grad
    (first, _) = watcher.observation().layers
    assert 0 < first.heads["entropy"][0].mean < 3


@pytest.mark.parametrize(
    "options", [{}, {"checkpoint_blocks": True}, {"recompute_gate": True}, {"attention_dropout": 0.3}]
)
def test_gradients_are_the_same_and_each_call_is_counted_once(options):
    model = language_model(dtype=torch.float32, **options)

    def gradients(context):
        model.zero_grad()
        torch.manual_seed(5)
        with context as watcher:
            for _ in range(2):
                model(TOKENS).square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters()], watcher

    expected, _ = gradients(nullcontext())
    actual, watcher = gradients(observe(model))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(actual, expected, strict=True))
    found = watcher.observation()
    assert found.num_batches == 2
    assert {moments.count for layer in found.layers for moments in layer.heads["mass"]} == {48}


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_model_runs_uncompiled_while_it_is_observed():
    model = language_model(dtype=torch.float32, num_layers=1)
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    expected = compiled(TOKENS)
    before = len(graphs)
    with observe(compiled) as watcher:
        actual = compiled(TOKENS)
    assert before > 0
    assert len(graphs) == before
    torch.testing.assert_close(actual, expected)
    found = watcher.observation()
    assert [layer.name for layer in found.layers] == ["stack.blocks.0.attention"]
    torch._dynamo.reset()
    graphs.clear()
    compiled(TOKENS)
    assert graphs


def test_padding_can_be_set_for_each_batch():
    model = Attention()
    q, k, v = qkv(B=2, T=4, S=4)
    with observe(model) as watcher:
        for real in ([4, 1], [2, 3]):
            watcher.padding = torch.arange(4) < torch.tensor(real)[:, None]
            model(q, k, v)
    assert watcher.observation().layers[0].heads["mass"][0].count == 10


def test_a_module_that_attends_with_other_heads_has_an_entry_for_each():
    model = Attention()
    with observe(model) as watcher:
        for num_heads in (4, 2, 4):
            model(*qkv(H=num_heads, G=num_heads))
    layers = watcher.observation().layers
    assert [(layer.name, layer.num_heads) for layer in layers] == [("Attention", 4), ("Attention (2 heads)", 2)]
    assert [layer.heads["mass"][0].count for layer in layers] == [28, 14]


def test_calls_without_queries_inside_transforms_and_outside_the_model_are_left_out():
    model, q = language_model(), qkv()[0]
    with observe(model) as watcher, observe(other := language_model("none"), residual=False) as second:
        F.scaled_dot_product_attention(q, q, q)
        model(TOKENS)
        model(TOKENS[:0])
        assert torch.func.vmap(model)(TOKENS[:, None]).shape == (3, 1, 9, 40)
        other(TOKENS)
        other(TOKENS)
    found = watcher.observation()
    assert [moments.count for layer in found.layers for moments in layer.heads["mass"]] == [24] * 8
    assert (found.num_batches, second.observation().num_batches) == (1, 2)
    assert [(bool(layer.gates), layer.residual) for layer in second.observation().layers] == [(False, None)] * 2


def sums_of(watcher):
    """The sums without effective ranks, whose last digits differ between computations."""
    found = watcher.observation()
    return found.num_batches, [replace(layer, residual=layer.residual.largest) for layer in found.layers]


def fail_in_second_block(model, error):
    """Raise an error after the second block has attended."""

    def fail(*_):
        raise error

    return model.stack.blocks[1].feedforward.register_forward_pre_hook(fail)


@pytest.mark.parametrize("gradients", [torch.enable_grad, torch.inference_mode], ids=["gradients", "inference"])
def test_a_batch_that_raises_is_not_counted(gradients):
    model = language_model()
    with gradients(), observe(model, heat=True) as watcher:
        model(TOKENS)
        expected = sums_of(watcher)
        hook = fail_in_second_block(model, ArithmeticError("on purpose"))
        with pytest.raises(ArithmeticError):
            model(2 * TOKENS % 40)
        assert sums_of(watcher) == expected
        hook.remove()
        model(TOKENS)
    found = watcher.observation()
    assert found.num_batches == 2
    assert {moments.count for layer in found.layers for moments in layer.heads["mass"]} == {48}


def test_an_interrupted_batch_is_not_counted_and_nothing_is_left_behind():
    model = language_model()
    with pytest.raises(KeyboardInterrupt), observe(model) as watcher:  # noqa: PT012
        model(TOKENS)
        expected = sums_of(watcher)
        hook = fail_in_second_block(model, KeyboardInterrupt())
        model(TOKENS)
    hook.remove()
    assert sums_of(watcher) == expected
    assert torch.backends.mha.get_fastpath_enabled()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with observe(model):
        pass


def test_calls_of_other_threads_are_not_counted():
    model = language_model()
    entered, waits = threading.Event(), threading.Event()

    def wait(*_):
        if threading.current_thread() is other:
            entered.set()
            waits.wait()

    model.stack.blocks[1].register_forward_pre_hook(wait)
    other = threading.Thread(target=model, args=(TOKENS,))
    with observe(model) as watcher:
        # The other thread is inside the model all the time that this one calls it.
        other.start()
        entered.wait()
        model(TOKENS)
        model(TOKENS)
        waits.set()
        other.join()
    found = watcher.observation()
    assert found.num_batches == 2
    assert [layer.name for layer in found.layers] == ["stack.blocks.0.attention", "stack.blocks.1.attention"]
    assert {moments.count for layer in found.layers for moments in layer.heads["mass"]} == {48}


@pytest.mark.parametrize(
    ("model", "options", "error"),
    [
        (Attention(), {"keys": 0}, rejects("keys")),
        (Attention(), {"keys": "sink"}, pytest.raises(TypeError)),
        (Attention(), {"keys": (0, -1)}, rejects("keys")),
        (Attention(), {"keys": torch.tensor([0])}, rejects("keys", hint="tuple")),
        (Attention(), {"padding": torch.ones(2, 7)}, rejects("padding", hint="attention_mask.bool()")),
        (Attention(), {"crossing": ("nowhere",)}, rejects("crossing", hint="named_modules")),
        (F.softmax, {}, pytest.raises(TypeError)),
        (Attention(), {"heat": "no"}, rejects("heat")),
    ],
)
def test_invalid_options_are_named(model, options, error):
    with error, observe(model, **options):
        pass


@pytest.mark.parametrize(("first", "second"), [("", ""), ("", "0"), ("0", "")])
def test_a_model_cannot_be_observed_twice_at_once(first, second):
    model = nn.Sequential(Attention())
    with (
        observe(model.get_submodule(first)),
        pytest.raises(RuntimeError, match="already"),
        observe(model.get_submodule(second)),
    ):
        pass
    with observe(model[0]) as watcher:
        model[0](*qkv())
    assert watcher.observation().num_batches == 1


@pytest.mark.parametrize(
    ("field", "shape"), [("padding", (3, 7)), ("padding", (2, 8)), ("padding", (2, 6)), ("keys", (3, 7))]
)
def test_padding_and_keys_of_another_batch_are_rejected(field, shape):
    model = Attention()
    with rejects(field), observe(model, **{field: torch.ones(shape, dtype=torch.bool)}):
        model(*qkv())


def test_an_observation_without_attention_is_an_error():
    with observe(language_model()) as watcher:
        pass
    with pytest.raises(RuntimeError, match="no attention call"):
        watcher.observation()


@pytest.mark.parametrize(
    "twin_of", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_made_meanwhile_is_not_the_model(twin_of):
    model = language_model()
    with observe(model) as watcher:
        model(TOKENS)
        twin = twin_of(model)
        assert torch.equal(twin(TOKENS), model(TOKENS))
        with observe(twin) as second:
            twin(TOKENS)
    found = watcher.observation()
    assert found.num_batches == 2
    assert {moments.count for layer in found.layers for moments in layer.heads["mass"]} == {48}
    assert second.observation().num_batches == 1
    # Its idle hooks keep neither the model nor the watcher.
    gone = [weakref.ref(each) for each in (model, watcher)]
    del model, watcher, found
    gc.collect()
    assert [each() for each in gone] == [None, None]
