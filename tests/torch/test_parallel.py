"""The plan of tensor parallelism: its placements and errors. Tests of training compare the results."""

import pytest
import torch
from errors import rejects
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from tidegate.config import TransformerConfig
from tidegate.torch import TransformerLM
from tidegate.torch.parallel import local_weights, tensor_parallel_plan

SIZES = {"d_model": 16, "num_layers": 1, "num_heads": 4, "vocab_size": 32}


def plan_of(gate, num_processes=2, **options):
    model = TransformerLM(TransformerConfig(gate=gate, **SIZES | options))
    plan = tensor_parallel_plan(model, num_processes)
    assert plan.keys() == {name for name, _ in model.named_parameters()}
    block = "stack.blocks.0."
    return {name.removeprefix(block): placed for name, placed in plan.items()}


@pytest.mark.parametrize(
    ("gate", "placements"),
    [
        ("g1", {"output.weight": Shard(0)}),
        ("bma", {"value.weight": Shard(0)}),
        ("sink", {"partition.bias": Shard(0)}),
        ("output:input:r2:b0", {name: Shard(0) for name in ("output.weight_down", "output.weight_up", "output.bias")}),
        ("output:input:shared-layer", {"output.weight": Replicate()}),
        ("g5", {"dense.weight": Shard(1)}),
        (
            "dense:input:r2:b0",
            {"dense.weight_down": Shard(1), "dense.weight_up": Replicate(), "dense.bias": Replicate()},
        ),
    ],
)
def test_a_gate_lies_with_the_heads_that_it_serves(gate, placements):
    plan = plan_of(gate)
    found = {name.removeprefix("attention.attn_gate."): placed for name, placed in plan.items() if "attn_gate" in name}
    assert {name: placed.placement for name, placed in found.items()} == placements


def test_all_else_lies_by_head_by_inner_channel_or_everywhere():
    plan = plan_of("none", bias=True, qk_norm=True, metric="learned", num_kv_heads=2)
    by_row = {f"attention.{name}_proj.{part}" for name in "qkv" for part in ("weight", "bias")}
    by_row |= {f"feedforward.{name}_proj.{part}" for name in ("gate", "up") for part in ("weight", "bias")}
    by_row |= {"attention.metric.weight"}
    by_column = {"attention.o_proj.weight", "feedforward.down_proj.weight"}
    assert {name for name, placed in plan.items() if placed.placement == Shard(0)} == by_row
    assert {name for name, placed in plan.items() if placed.placement == Shard(1)} == by_column
    assert plan["attention.q_norm.weight"].gradient == "summed"
    assert plan["attention.o_proj.bias"].gradient == "shared"
    assert plan["embedding.weight"].gradient == "whole"


@pytest.mark.parametrize(
    ("gate", "options", "number", "named"),
    [
        ("g1", {}, 3, "the 4 heads of stack.blocks.0.attention (num_heads)"),
        ("g1", {"num_kv_heads": 1}, 2, "the 1 head of stack.blocks.0.attention (num_kv_heads)"),
        ("dense:input:w5", {}, 2, "the 5 channels that the gate dense:input:w5 of stack.blocks.0.attention reads"),
    ],
)
def test_more_processes_than_heads_are_rejected(gate, options, number, named):
    with rejects("num_processes") as caught:
        plan_of(gate, number, **options)
    assert named in caught.value.expected
    assert caught.value.got == number


def test_a_model_that_is_whole_is_left_as_it_is():
    model = nn.Linear(2, 2)
    with local_weights(model):
        assert torch.equal(model(torch.eye(2)), model.weight.T + model.bias)
