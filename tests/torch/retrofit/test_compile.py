import pytest
import torch
from closeness import assert_close
from retrofit_models import adapt, inputs_of, logits, stir, tiny
from torch import _dynamo as dynamo

from tidegate.torch.retrofit import add_gates


@pytest.fixture(autouse=True)
def _fresh_compiler():
    dynamo.reset()
    yield
    dynamo.reset()


@pytest.mark.parametrize(
    ("family", "gate"), [("llama", "bma+g1+g5"), ("gpt2", "bma"), ("bert", "dense:output"), ("vit", "bma-query")]
)
def test_a_gated_model_computes_the_same_as_one_graph(family, gate):
    model = tiny(family, num_hidden_layers=1)
    add_gates(model, gate)
    stir(model)
    inputs = inputs_of(model)
    # With `fullgraph` a break is an error.
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_close(logits(compiled, inputs), logits(model, inputs), what="forward")


def test_the_compiler_counts_one_graph_and_no_break():
    model = tiny("llama", num_hidden_layers=1)
    add_gates(model, "g1")
    found = dynamo.explain(model)(**inputs_of(model))
    assert (found.graph_count, found.graph_break_count) == (1, 0)


def test_adapters_put_on_before_compiling_leave_one_graph():
    model = tiny("llama", num_hidden_layers=1)
    add_gates(model, "bma+g5")
    stir(model)
    adapt(model, ("q_proj", "v_proj", "o_proj"))
    inputs = inputs_of(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_close(logits(compiled, inputs), logits(model, inputs), what="forward")
