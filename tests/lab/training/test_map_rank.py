import pytest
import torch
from closeness import assert_close
from lab_runs import LENGTH, model_of

from tidegate.config import VisionConfig
from tidegate.lab.tasks.task import Batch
from tidegate.lab.training.model import build_model
from tidegate.lab.training.observe import GateValues, map_products, map_ranks, observe_probe
from tidegate.torch.observing.modules import follow_modules
from tidegate.torch.observing.sums import effective_rank

N, M, D = 5, 7, 3
SIZES = {"gate_ND": [(N, D), (N, 1), None], "dense_NM": [(N, M), (N, 1), None]}
VISION = {"d_model": 16, "num_layers": 2, "num_heads": 2, "image_size": 8, "patch_size": 4, "channels": 1}
GROUPED = {"num_heads": 4, "num_kv_heads": 2}


def rank_by_svd(maps_NMM):
    """The effective rank of all maps side by side, from the singular values of that one wide matrix."""
    singular = torch.linalg.svdvals(torch.cat(list(maps_NMM), dim=1))
    return torch.special.entr(singular / singular.sum()).sum().exp()


def numbers(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def maps_of(value_MD, output_DM, gate_ND=None, dense_NM=None):
    """Every token's map, spelled out."""
    gates, denses = (torch.ones(N, 1, dtype=torch.float64) if x is None else x for x in (gate_ND, dense_NM))
    return [value_MD @ (gate[:, None] * output_DM * dense) for gate, dense in zip(gates, denses, strict=True)]


class TestTheProducts:
    @pytest.mark.parametrize("dense_NM", SIZES["dense_NM"], ids=str)
    @pytest.mark.parametrize("gate_ND", SIZES["gate_ND"], ids=str)
    def test_have_the_rank_of_the_maps_side_by_side(self, gate_ND, dense_NM):
        value, output = numbers(M, D, seed=0), numbers(D, M, seed=1)
        sizes = {"gate_ND": gate_ND, "dense_NM": dense_NM}
        factors = {name: numbers(*size, seed=2).square() for name, size in sizes.items() if size is not None}
        expected = rank_by_svd(maps_of(value, output, **factors))
        assert_close(effective_rank(map_products(value, output, **factors)), expected, what="finite difference")

    def test_of_a_head_wider_than_the_model_have_its_rank(self):
        value, output = numbers(D, M, seed=0), numbers(M, D, seed=1)
        products = map_products(value, output)
        assert products.shape == (D, D)
        assert_close(effective_rank(products), rank_by_svd([value @ output]), what="finite difference")

    def test_of_one_direction_get_more_of_them_from_a_gate_and_never_more_than_the_width(self):
        value, output = numbers(M, D, seed=0), torch.outer(torch.ones(D), torch.ones(M)).double()
        assert_close(effective_rank(map_products(value, output)), 1.0, what="finite difference")
        gated = effective_rank(map_products(value, output, gate_ND=numbers(N, D, seed=1)))
        assert 1.5 < gated <= D

    def test_of_what_lets_nothing_pass_have_rank_0(self):
        closed = torch.zeros(N, D, dtype=torch.float64)
        assert effective_rank(map_products(numbers(M, D, seed=0), numbers(D, M, seed=1), gate_ND=closed)) == 0


def restless(config):
    """A model whose gates differ from token to token."""
    model = build_model(config, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    return model


def example(config):
    generator = torch.Generator().manual_seed(0)
    if isinstance(config, VisionConfig):
        return Batch(torch.randn(3, 1, 8, 8, generator=generator), torch.zeros(3, dtype=torch.int64))
    tokens = torch.randint(256, (3, LENGTH), generator=generator)
    return Batch(tokens, tokens)


def ranks_of(model, batch):
    """By layer and head, as a run sees them."""
    gates = GateValues()
    with torch.no_grad(), follow_modules(model.eval(), gates):
        model(batch.inputs)
    return map_ranks(model, gates.by_gate)


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


CASES = [
    (model_of("none"), ()),
    (model_of("g1"), ("output",)),
    (model_of("bma", **GROUPED), ("value",)),
    (model_of("vga+bma-query", **GROUPED), ("value", "output")),
    (model_of("g5"), ("dense",)),
    (model_of("g1+g5"), ("output", "dense")),
    (model_of("output:nothing+g3+g4"), ("output",)),
    (model_of("output:input:shuffled"), ("output",)),
    (VisionConfig(gate="g1", **VISION), ("output",)),
]


@pytest.mark.parametrize(("config", "sites"), CASES, ids=lambda value: str(getattr(value, "gate", "")))
def test_the_rank_that_a_run_sees_is_that_of_all_maps_side_by_side(config, sites):
    model, batch = restless(config), example(config)
    seen = torch.tensor(ranks_of(model, batch), dtype=torch.float64)
    assert_close(seen, torch.tensor(ranks_by_svd(model, batch, sites)), what="finite difference")
    width = config.d_model // config.num_heads
    assert bool(((seen > 0) & (seen <= width)).all())


@pytest.mark.parametrize("gate", ["g1-head", "sink", "off-by-one", "output:input:constant", "g3", "sink+g1-head"])
def test_one_factor_for_a_whole_head_leaves_the_rank_as_it_is(gate):
    plain, gated = build_model(model_of("none"), seed=0), build_model(model_of(gate), seed=0)
    batch = example(model_of())
    expected = torch.tensor(ranks_of(plain, batch), dtype=torch.float64)
    seen = torch.tensor(ranks_of(gated, batch), dtype=torch.float64)
    assert_close(seen, expected, what="finite difference")


@pytest.mark.parametrize(
    "gate", ["output:input:add", "value:input:tanh:add", "output:output:gelu:replace", "g1+dense:input:add"]
)
def test_what_adds_or_replaces_on_the_way_leaves_no_map(gate):
    config = model_of(gate)
    assert ranks_of(restless(config), example(config)) is None


def test_a_run_that_observes_its_probe_has_the_ranks_on_record():
    config = model_of("g1+g2")
    model, batch = restless(config), example(config)
    assert observe_probe(model, batch, tokens=0).map_rank == ranks_of(model, batch)
