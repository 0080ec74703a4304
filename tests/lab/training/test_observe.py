import math
from dataclasses import replace

import pytest
import torch
from closeness import assert_close
from lab_runs import LENGTH, model_of

from tidegate.config import VisionConfig
from tidegate.lab.tasks.task import NO_TARGET, Batch
from tidegate.lab.training.model import batch_loss, build_model, evaluate
from tidegate.lab.training.observe import loss_by_position, observe_probe, summarize_observation
from tidegate.torch.observing import observe

GATES = ["none", "g1", "bma", "g1-head+g5", "vga+bma-query"]
VISION = {"d_model": 16, "num_layers": 2, "num_heads": 2, "image_size": 8, "patch_size": 4, "channels": 1}


def restless(config):
    """A model far from its start, so that attention and gates are no longer uniform."""
    model = build_model(config, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(len(name))
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def example(config, rows=3):
    generator = torch.Generator().manual_seed(0)
    if isinstance(config, VisionConfig):
        return Batch(torch.randn(rows, 1, 8, 8, generator=generator), torch.zeros(rows, dtype=torch.int64))
    tokens = torch.randint(256, (rows, LENGTH + 1), generator=generator)
    return Batch(tokens[:, :-1], tokens[:, 1:])


def configurations(gate):
    return [model_of(gate), model_of(gate, num_heads=4, num_kv_heads=2, window=5), VisionConfig(gate=gate, **VISION)]


CASES = [config for gate in GATES for config in configurations(gate)]


@pytest.mark.parametrize(
    "config",
    [model_of("g1", dropout=0.5, attention_dropout=0.5), VisionConfig(gate="g1", **VISION)],
    ids=["decoder", "classifier"],
)
def test_to_look_changes_nothing_and_draws_no_random_number(config):
    model, batch = restless(config), example(config)
    batch_loss(model, batch).backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    state = torch.get_rng_state()
    assert observe_probe(model, batch, tokens=0) == observe_probe(model, batch, tokens=0)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(parameter.grad, old) for parameter, old in zip(model.parameters(), gradients, strict=True))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(block._forward_hooks for block in model.stack.blocks)


@pytest.mark.parametrize("size", [math.nan, math.inf, 3e38])
def test_of_numbers_that_are_not_finite_there_is_nothing_to_see(size):
    model = build_model(model_of("output:input:identity"), seed=0)
    with torch.no_grad():
        for block in model.stack.blocks:
            block.attention.v_proj.weight.fill_(size)
    assert observe_probe(model, example(model.config), tokens=0) is None


def test_queries_that_all_see_themselves_alone_have_no_means():
    config = model_of("g1", window=1)
    seen = observe_probe(restless(config), example(config), tokens=0)
    assert seen.entropy == seen.sink_mass == seen.sink_impact == ((None, None), (None, None))
    assert seen.sink_contribution is None
    assert seen.effective_rank[0] > 0


@pytest.mark.parametrize(
    "config", [*CASES, model_of("sink+g1")], ids=lambda config: f"{type(config).__name__}-{config.gate}"
)
def test_a_comparison_sees_what_observe_sees(config):
    model, batch = restless(config), example(config)
    summary = observe_probe(model, batch, tokens=7)
    with torch.no_grad(), observe(model.eval()) as watcher:
        model(batch.inputs)
    layers = watcher.observation().layers
    for field, statistic in {
        "entropy": "entropy",
        "sink_mass": "mass",
        "sink_impact": "impact",
        "sink_contribution": "contribution",
    }.items():
        assert getattr(summary, field) == tuple(tuple(each.mean for each in layer.heads[statistic]) for layer in layers)
    sinks = tuple(tuple(each.mean for each in layer.heads["sink"]) for layer in layers if "sink" in layer.heads)
    assert summary.sink_logit == (sinks or None)
    assert bool(sinks) == ("sink" in str(config.gates))
    assert summary.largest_activation == tuple(layer.residual.largest for layer in layers)
    assert summary.effective_rank == tuple(layer.residual.effective_rank for layer in layers)
    assert set(summary.gates) == set(layers[0].gates)
    for site, figures in summary.gates.items():
        gates = [layer.gates[site] for layer in layers]
        assert figures["mean"] == tuple(gate.mean for gate in gates)
        assert figures["below"] == tuple(gate.below for gate in gates)
        assert figures["spread"] == tuple(gate.token_spread for gate in gates)
    # The map from value to output is no part of an observation.
    assert replace(summary, map_rank=None) == summarize_observation(watcher.observation(), tokens=7)


class TestTheLossByPosition:
    @pytest.mark.parametrize("length", [1, 31, 32, 100, 128])
    def test_averages_back_to_the_mean_loss(self, length):
        model = restless(model_of("bma"))
        tokens = torch.randint(256, (3, length + 1), generator=torch.Generator().manual_seed(0))
        batch = Batch(tokens[:, :-1], tokens[:, 1:])
        curve = loss_by_position(model, batch)
        sizes = [len(part) for part in torch.arange(length).chunk(32)]
        mean = sum(size * loss for size, (_, loss) in zip(sizes, curve, strict=True)) / length
        assert_close(torch.tensor(mean), torch.tensor(evaluate(model, [batch]).loss), dtype="float32")

    def test_places_each_loss_in_the_middle_of_its_stretch_counted_from_one(self):
        batch = Batch(*torch.zeros(2, 1, 64, dtype=torch.int64))
        positions = [position for position, _ in loss_by_position(build_model(model_of(), seed=0), batch)]
        assert positions == [1.5 + 2 * stretch for stretch in range(32)]

    def test_leaves_out_stretches_without_a_target(self):
        targets = torch.zeros(2, 8, dtype=torch.int64)
        targets[:, :5] = NO_TARGET
        targets[0, 6] = NO_TARGET
        model = build_model(model_of(), seed=0)
        curve = loss_by_position(model, Batch(torch.zeros_like(targets), targets))
        assert [position for position, _ in curve] == [6, 7, 8]
        whole = loss_by_position(model, Batch(torch.zeros_like(targets), torch.zeros_like(targets)))
        assert_close(torch.tensor(curve), torch.tensor(whole[5:]))


GROUPED = {"num_heads": 4, "num_kv_heads": 2}


def rank_by_svd(maps_NMM):
    """The effective rank of all maps side by side, from the singular values of that one wide matrix."""
    singular = torch.linalg.svdvals(torch.cat(list(maps_NMM), dim=1))
    return torch.special.entr(singular / singular.sum()).sum().exp()


def ranks_by_svd(model, batch, sites):
    """By layer and head, from the values of the gates at some sites as a trace has them."""
    model.eval()
    with torch.no_grad():
        _, traces = model.trace(batch.inputs)
    layers = [block.attention for block in model.stack.blocks]
    return [_ranks_of_layer(layer, trace, sites) for layer, trace in zip(layers, traces, strict=True)]


def _ranks_of_layer(layer, trace, sites):
    heads, width = layer.shape.num_heads, layer.shape.head_dim
    value = (
        layer.v_proj.weight.detach()
        .double()
        .unflatten(0, (-1, width))
        .repeat_interleave(heads // layer.shape.num_kv_heads, dim=0)
    )
    output = layer.o_proj.weight.detach().double().unflatten(1, (heads, width))
    values = {site: trace.gates[site].double().flatten(0, 1) for site in sites}
    num_tokens = 3 * trace.query.shape[2]
    ranks = []
    for head in range(heads):
        factor = torch.ones(num_tokens, width, dtype=torch.float64)
        for site in [site for site in sites if site != "dense"]:
            own = values[site].repeat_interleave(heads // values[site].shape[1], dim=1)
            factor = factor * own[:, head]
        maps = value[head].mT @ (factor[:, :, None] * output[:, head].mT)
        ranks.append(rank_by_svd(maps * values["dense"][:, None] if "dense" in sites else maps))
    return ranks


RANK_CASES = [
    (model_of("none"), ()),
    (model_of("g1"), ("output",)),
    (model_of("bma", **GROUPED), ("value",)),
    (model_of("vga+bma-query", **GROUPED), ("value", "output")),
    (model_of("g5"), ("dense",)),
    # Its heads are wider than the model.
    (model_of("g1-head", head_dim=20), ("output",)),
    (model_of("g1+g5"), ("output", "dense")),
    (model_of("output:nothing+g3+g4"), ("output",)),
    (model_of("output:input:shuffled"), ("output",)),
    (VisionConfig(gate="g1", **VISION), ("output",)),
]


@pytest.mark.parametrize(("config", "sites"), RANK_CASES, ids=lambda value: str(getattr(value, "gate", "")))
def test_the_rank_that_a_run_sees_is_that_of_all_maps_side_by_side(config, sites):
    model, batch = restless(config), example(config)
    seen = torch.tensor(observe_probe(model, batch, tokens=0).map_rank, dtype=torch.float64)
    assert_close(seen, torch.tensor(ranks_by_svd(model, batch, sites)), what="finite difference")
    assert bool(((seen > 0) & (seen <= config.d_model)).all())


@pytest.mark.parametrize("gate", ["g1-head", "sink", "off-by-one", "output:input:constant", "g3", "sink+g1-head"])
def test_one_factor_for_a_whole_head_leaves_the_rank_as_it_is(gate):
    plain, gated = build_model(model_of("none"), seed=0), build_model(model_of(gate), seed=0)
    batch = example(model_of())
    expected, seen = (
        torch.tensor(observe_probe(model, batch, tokens=0).map_rank, dtype=torch.float64) for model in (plain, gated)
    )
    assert_close(seen, expected, what="finite difference")


@pytest.mark.parametrize(
    "gate", ["output:input:add", "value:input:tanh:add", "output:output:gelu:replace", "g1+dense:input:add"]
)
def test_what_adds_or_replaces_on_the_way_leaves_no_map(gate):
    config = model_of(gate)
    assert observe_probe(restless(config), example(config), tokens=0).map_rank is None
