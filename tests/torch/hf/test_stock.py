import pytest
import torch
from closeness import assert_close
from errors import rejects

from tidegate.config import Rotary, TransformerConfig
from tidegate.torch import TransformerLM
from tidegate.torch.hf import to_stock_model
from tidegate.torch.retrofit import add_gates

SIZES = {"gate": "none", "d_model": 16, "num_layers": 2, "num_heads": 4, "vocab_size": 64, "max_length": 32}
TOKENS = torch.arange(18).reshape(2, 9) * 7 % 64


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "LlamaForCausalLM"),
        ({"tie_embeddings": False, "num_kv_heads": 2, "head_dim": 6, "rotary": Rotary(base=500.0)}, "LlamaForCausalLM"),
        ({"qk_norm": True, "d_ff": 24}, "Qwen3ForCausalLM"),
    ],
    ids=["llama", "grouped heads", "qwen3"],
)
def test_the_logits_are_ours(options, kind):
    torch.manual_seed(0)
    model = TransformerLM(TransformerConfig(**SIZES | options)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    stock = to_stock_model(model)
    assert type(stock).__name__ == kind
    assert not stock.training
    assert_close(stock(TOKENS).logits, model(TOKENS))
    assert stock.get_input_embeddings().weight.data_ptr() != model.embedding.weight.data_ptr()
    # Gates can be added, as in every model of transformers.
    add_gates(stock)
    assert_close(stock(TOKENS).logits, model(TOKENS))


@pytest.mark.parametrize(
    "options",
    [
        {"gate": "g1"},
        {"feedforward": "gelu"},
        {"norm": "layer"},
        {"rotary": Rotary(scale=2.0)},
        {"window": 4},
        {"bias": True},
        {"d_ff": (8, 16)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_transformers_has_not_is_refused(options):
    (field,) = options
    with rejects(field, hint="transformers has no other decoder"):
        to_stock_model(TransformerLM(TransformerConfig(**SIZES | options)))
