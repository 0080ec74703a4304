import pytest
import torch
from closeness import assert_close
from retrofit_models import adapt, inputs_of, logits, stir, tiny
from torch._dynamo.testing import CompileCounter

from tidegate.torch.retrofit import add_gates

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.parametrize(
    ("family", "gate"),
    [
        ("llama", "bma+g1+g5"),
        ("gpt2", "bma"),
        ("bert", "dense:output"),
        ("vit", "bma-query"),
        # A gate before the output projection.
        pytest.param("gpt2", "g1", marks=pytest.mark.full),
    ],
)
def test_a_gated_model_computes_the_same_as_one_graph(family, gate):
    model = tiny(family, num_hidden_layers=1)
    add_gates(model, gate)
    stir(model)
    inputs = inputs_of(model)
    # With `fullgraph` a graph break is an error.
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    assert_close(logits(compiled, inputs), logits(model, inputs), what="forward")
    assert counter.frame_count == 1


def test_adapters_put_on_before_compiling_leave_one_graph():
    model = tiny("llama", num_hidden_layers=1)
    add_gates(model, "bma+g5")
    stir(model)
    adapt(model, ("q_proj", "v_proj", "o_proj"))
    inputs = inputs_of(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_close(logits(compiled, inputs), logits(model, inputs), what="forward")
