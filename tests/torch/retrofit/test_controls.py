"""Controls in a trained model: a trained constant can be added and merged, placebos and functions cannot."""

import pytest
import torch
from errors import rejects
from transformers import LlamaConfig, LlamaForCausalLM

from tidegate.torch import gate_parameters
from tidegate.torch.retrofit import add_gates, merge_gates

TOKENS = torch.randint(31, (2, 7), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=31, num_attention_heads=4, num_key_value_heads=2, **sizes)
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
@pytest.mark.parametrize(
    "gate", ["output:nothing", "value:nothing:head", "key:nothing", "dense:nothing", "output:nothing+value:nothing"]
)
def test_a_trained_constant_changes_no_bit_at_first_and_is_absorbed_at_last(model, gate):
    before = model(TOKENS).logits
    with torch.enable_grad():
        add_gates(model, gate)
    assert torch.equal(model(TOKENS).logits, before)
    for parameter in gate_parameters(model):
        parameter.normal_()
    trained = model(TOKENS).logits
    assert not torch.allclose(trained, before)
    merge_gates(model)
    assert not list(gate_parameters(model))
    torch.testing.assert_close(model(TOKENS).logits, trained)


@pytest.mark.parametrize("gate", ["output:input:constant", "output:input:shuffled", "output:output:gelu:replace"])
def test_controls_that_train_from_the_start_cannot_be_added(model, gate):
    with rejects("gate", hint="use 'output:nothing'"):
        add_gates(model, gate)
