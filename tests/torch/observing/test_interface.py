"""Eager attention of transformers is intercepted where models look it up, and the lookup is restored."""

import threading

import pytest
import torch
from observed import assert_curves, assert_moments, plain_statistics, several_keys
from torch import nn
from transformers import AttentionInterface, Gemma2Config, Gemma2Model, GptOssConfig, GptOssModel
from transformers.models.llama.modeling_llama import eager_attention_forward as llama_eager
from transformers.models.t5.modeling_t5 import eager_attention_forward as t5_eager

from tidegate.torch.observing.interface import watch_interface
from tidegate.torch.observing.watcher import observe

INF = float("inf")
STOCK = AttentionInterface.get_interface
SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 4}
TOKENS = torch.randint(50, (2, 10), generator=torch.Generator().manual_seed(0))
LEFT = torch.arange(10) >= torch.tensor([0, 3])[:, None]
BUILD = {
    "gpt_oss": lambda: GptOssModel(GptOssConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1)),
    "gemma2": lambda: Gemma2Model(Gemma2Config(**SIZES, attn_logit_softcapping=2.0, query_pre_attn_scalar=8)),
}


@pytest.fixture(autouse=True)
def lookup_is_restored():
    yield
    assert AttentionInterface.get_interface is STOCK


@pytest.fixture(scope="module", params=BUILD)
def model(request):
    """A tiny random model with large scores and different sinks."""
    torch.manual_seed(0)
    model = BUILD[request.param]().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.mul_(12)
            if name.endswith("sinks"):
                parameter.copy_(torch.linspace(-1, 2, 4))
    return model


class Recorder:
    """An eager attention function that records its arguments."""

    def __init__(self, function):
        self.function, self.calls = function, []

    def __call__(self, module, query, key, value, mask, **options):
        self.calls.append((module, query, key, value, mask, options))
        return self.function(module, query, key, value, mask, **options)


def recorded(model, monkeypatch):
    """Record the calls of the model's own eager function."""
    namespace = model.layers[0].self_attn.forward.__globals__
    recorder = Recorder(namespace["eager_attention_forward"])
    monkeypatch.setitem(namespace, "eager_attention_forward", recorder)
    return recorder


def expected_of(call):
    """Every statistic by the definition, in float64, and the weights."""
    _, q, k, v, mask, options = call
    q, k, v = (x.double() for x in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
    scores = q @ k.mT * options["scaling"]
    if softcap := options.get("softcap"):
        scores = softcap * (scores / softcap).tanh()
    forbidden = (mask <= -1e4).expand_as(scores)
    scores = scores.masked_fill(forbidden, -INF)
    sinks = options.get("s_aux")
    states = scores
    if sinks is not None:
        states = torch.cat((scores, sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)), -1)
    weights = states.softmax(-1).nan_to_num(0.0)
    real = ~forbidden[:, 0].all(1)
    first = real & (real.cumsum(-1) == 1)
    keys = weights[..., : k.shape[2]]
    found = plain_statistics(keys, scores.masked_fill(forbidden, 0), v.norm(dim=-1), first[:, None, None])
    if sinks is not None:
        sink = weights[..., -1]
        found["sink"] = sink
        found["entropy"] = found["entropy"] - torch.xlogy(sink, sink)
        found["effective_keys"] = found["entropy"].exp()
        found["mean_score"] = found["mean_score"] + sink * sinks.double()[:, None]
        apart = torch.cat((scores.masked_fill(forbidden, 0), states[..., -1:]), -1) - found["mean_score"][..., None]
        found["heat_capacity"] = (weights * apart**2).sum(-1)
    return found, keys, real


@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_every_statistic_is_that_of_the_definition(model, padded, monkeypatch):
    monkeypatch.setattr("observed.TOLERANCE", 1e-5)
    options = {"attention_mask": LEFT.long()} if padded else {}
    before = model(TOKENS, **options).last_hidden_state
    calls = recorded(model, monkeypatch).calls
    with observe(model, heat=True) as watcher:
        after = model(TOKENS, **options).last_hidden_state
    assert torch.equal(before, after)
    found = watcher.observation()
    assert [layer.name for layer in found.layers] == ["layers.0.self_attn", "layers.1.self_attn"]
    for layer, call in zip(found.layers, calls, strict=True):
        statistics, weights, real = expected_of(call)
        assert layer.heads.keys() == {*statistics, "contribution"}
        for name, values in statistics.items():
            assert_moments(layer, name, values, real[:, None] & several_keys(weights))
            assert_curves(layer, name, values, real[:, None].expand(values.shape))


@torch.no_grad()
def test_decoding_with_a_cache_gives_the_same_as_one_pass(model):
    with observe(model) as watcher:
        model(TOKENS)
    whole = watcher.observation()
    with observe(model) as watcher:
        cache = None
        for part in TOKENS.split((6, 2, 1, 1), dim=1):
            cache = model(part, past_key_values=cache, use_cache=True).past_key_values
    for mine, theirs in zip(watcher.observation().layers, whole.layers, strict=True):
        assert mine.positions == theirs.positions
        for statistic in ("mass", "entropy", "impact", "mean_score", *({"sink"} & theirs.heads.keys())):
            found, expected = (torch.tensor(layer.by_position[statistic]) for layer in (mine, theirs))
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_gradients_do_not_change(model):
    def gradients(context):
        model.zero_grad()
        with context as watcher:
            model(TOKENS).last_hidden_state.square().sum().backward()
        return [parameter.grad for parameter in model.parameters()], watcher

    plain, _ = gradients(torch.enable_grad())
    watched, watcher = gradients(observe(model))
    assert all(x is None or torch.equal(x, y) for x, y in zip(plain, watched, strict=True))
    assert watcher.observation().layers[0].heads["mass"][0].count == 2 * 9


class Attends(nn.Module):
    """A module that looks up its attention function, like models of transformers."""

    num_key_value_groups = 1
    is_causal = False

    def __init__(self, function=llama_eager, implementation="eager", **options):
        super().__init__()
        self.function, self.implementation, self.options = function, implementation, options

    def attend(self, x):
        function = AttentionInterface().get_interface(self.implementation, self.function)
        q = x.view(*x.shape[:2], 2, 4).transpose(1, 2)
        return function(self, q, q, q, None, **({"scaling": 0.5} | self.options))

    def forward(self, x):
        return self.attend(x)[0].reshape(x.shape)


X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


def counts(model, *inputs):
    with observe(model) as watcher:
        model(*inputs or (X,))
    return [layer.heads["mass"][0].count for layer in watcher.observation().layers]


def kernel(*arguments, **options):
    """An eager function that calls the kernel."""
    return AttentionInterface()["sdpa"](*arguments, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options", [{}, {"implementation": "sdpa"}, {"function": kernel}], ids=["eager", "sdpa", "kernel"]
)
def test_a_call_is_counted_once(options, dtype):
    # Warnings are errors.
    assert counts(Attends(**options), 6 * X.to(dtype)) == [10]


def test_a_call_with_a_position_bias_is_recognized_by_its_softmax():
    bias = torch.linspace(-2, 2, 50).view(1, 2, 5, 5)
    model = Attends(t5_eager, position_bias=bias)
    with observe(model) as watcher:
        model(X)
    q = X.view(2, 5, 2, 4).transpose(1, 2)
    weights = (q @ q.mT * 0.5 + bias).softmax(-1)
    found = torch.tensor([moments.mean for moments in watcher.observation().layers[0].heads["mass"]])
    torch.testing.assert_close(found, weights[..., 0].mean((0, 2)), atol=1e-5, rtol=1e-5)


class Discarding(Attends):
    """A module that does not use the result of its attention."""

    def forward(self, x):
        self.attend(x)
        return x


RESULTS = {
    "with heads put together": lambda result: (result[0].flatten(2), None),
    "with heads first": lambda result: (result[0].transpose(1, 2), None),
    "no tensor": lambda result: (None, result[0]),
}


@pytest.mark.parametrize("kind", ["of another temperature", *RESULTS])
def test_a_function_with_another_result_is_left_out_with_a_warning(kind):
    def function(*arguments, **options):
        return RESULTS[kind](llama_eager(*arguments, **options))

    model = Discarding(function if kind in RESULTS else colder)
    with pytest.warns(UserWarning, match="Discarding"), observe(model) as seen:
        assert torch.equal(model(X), X)
    with pytest.raises(RuntimeError):
        seen.observation()


def colder(module, query, *arguments, **options):
    return llama_eager(module, 4 * query, *arguments, **options)


@pytest.mark.parametrize(("function", "scaling"), [(llama_eager, 0.5), (colder, 2.0)])
def test_statistics_are_of_the_computed_weights_before_dropout(function, scaling):
    model, plain = Attends(function, dropout=0.5).train(), Attends(scaling=scaling)
    with observe(model) as watcher:
        model(X)
    with observe(plain) as expected:
        plain(X)
    found, wanted = (
        torch.tensor([moments.mean for moments in seen.observation().layers[0].heads["entropy"]])
        for seen in (watcher, expected)
    )
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_a_lookup_that_wraps_ours_stays_and_nothing_counts_twice():
    seen = []
    with watch_interface(seen.append):
        ours = AttentionInterface.get_interface
        AttentionInterface.get_interface = around = lambda *arguments: ours(*arguments)
    try:
        assert AttentionInterface.get_interface is around
        with watch_interface(seen.append):
            Attends()(X)
        assert len(seen) == 1
        Attends()(X)
        assert len(seen) == 1
        assert AttentionInterface.get_interface is around
    finally:
        AttentionInterface.get_interface = STOCK


def test_two_watchers_get_each_call_and_the_last_restores_the_lookup():
    first, second = [], []
    with watch_interface(first.append):
        with watch_interface(second.append):
            Attends()(X)
        Attends()(X)
        assert AttentionInterface.get_interface is not STOCK
    assert (len(first), len(second)) == (2, 1)


def test_transforms_the_meta_device_and_other_threads_are_ignored():
    seen = []
    with watch_interface(seen.append):
        torch.func.grad(lambda x: Attends()(x).sum())(X)
        Attends()(X.to("meta"))
        thread = threading.Thread(target=Attends(), args=(X,))
        thread.start()
        thread.join()
    assert seen == []
