import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from damage import forge_tensors, some_flips
from errors import rejects
from jax_models import SIZES, make, make_torch, with_stacked_blocks

from tidegate import PRESETS
from tidegate.config import TransformerConfig, VisionConfig
from tidegate.flax import from_torch, load_params, save_params, to_torch
from tidegate.tensors.rotary import Rotary
from tidegate.torch import TransformerLM, VisionTransformer, load_model, save_model

MODELS = {
    **{gate: {"gate": gate, "num_layers": 1} for gate in ("none", *PRESETS)},
    "all": {
        "gate": "output:input:r2:b0+value:query:r2:b1+key:input+query:value:b0+dense:output:r3:b1",
        "num_kv_heads": 2, "head_dim": 8, "qk_norm": True, "metric": "learned", "bias": True, "norm": "layer",
        "feedforward": "gelu", "rotary": Rotary(fraction=0.5), "tie_embeddings": False,
    },
    "learned": {"positions": "learned", "metric": "diagonal"},
}  # fmt: skip
ALWAYS = ("none", "bma", "all", "learned")
every_model = pytest.mark.parametrize(
    "options",
    [pytest.param(MODELS[name], marks=[] if name in ALWAYS else pytest.mark.full) for name in MODELS],
    ids=MODELS,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for first, second in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert first.dtype == second.dtype
        assert np.array_equal(first, second)


@every_model
def test_a_file_of_pytorch_goes_through_jax_and_back_bit_by_bit(path, options):
    model = make_torch(**options)
    save_model(model, path)
    config, params = load_params(path)
    save_params(path, params, config)
    again = load_model(path)
    assert again.config == model.config
    for (name, one), (other_name, other) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert name == other_name
        assert torch.equal(one, other)


def test_stacked_blocks_are_taken_apart():
    config, params = make()
    assert_same(to_torch(with_stacked_blocks(params), config), to_torch(params, config))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_dtype_is_kept_or_changed_on_demand(path, dtype):
    model = TransformerLM(TransformerConfig(**SIZES | {"num_layers": 1}), dtype=dtype)
    save_model(model, path)
    kept = str(dtype).removeprefix("torch.")
    _, params = load_params(path)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {kept}
    assert_same(from_torch(model.state_dict(), model.config), params)
    _, single = load_params(path, dtype=jnp.float32)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(single)} == {"float32"}


def test_parameters_do_not_change_with_the_tensors_they_came_from():
    model = TransformerLM(TransformerConfig(**SIZES))
    params = from_torch(model.state_dict(), model.config)
    before = jax.tree.map(lambda array: array.tolist(), params)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert jax.tree.map(lambda array: array.tolist(), params) == before


# A wrong header is tested with PyTorch's loader, which reads it by the same function.
REJECTED = [
    ({"metadata": {"format": None}, "sealed": False}, "Write it with save_params."),
    ({"tensors": {"stack.norm.weight": torch.zeros(3)}}, "stack.norm.weight has shape (3,), expected (24,)."),
]


@pytest.mark.parametrize(("changes", "message"), REJECTED, ids=[row[1] for row in REJECTED])
def test_a_file_that_does_not_fit_is_rejected_with_its_path(path, changes, message):
    save_model(make_torch(), path)
    forge_tensors(path, **changes)
    with pytest.raises(ValueError, match=re.escape(message)) as rejected:
        load_params(path)
    assert str(path) in str(rejected.value)


def test_a_flipped_bit_anywhere_is_noticed(path):
    config, params = make()
    save_params(path, params, config)
    for changed in some_flips(path.read_bytes(), 100):
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            load_params(path)


def test_a_model_of_another_kind_is_rejected(path):
    save_model(VisionTransformer(VisionConfig(num_layers=1)), path)
    with rejects("path", hint="a model 'VisionTransformer'"):
        load_params(path)


def test_a_pickle_is_rejected_and_not_read(path):
    torch.save(make_torch().state_dict(), path)
    with rejects("path"):
        load_params(path)


def test_a_file_that_is_not_there_is_missed_by_name(path):
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        load_params(path)


def test_parameters_of_another_configuration_are_rejected(path):
    config, params = make(gate="bma")
    missing = "params do not fit the configuration: stack.blocks.0.attention.attn_gate.output.weight is missing"
    with pytest.raises(ValueError, match=missing):
        save_params(path, params, replace(config, gate="bma+g1"))
    assert not path.exists()
    with pytest.raises(ValueError, match=r"state does not fit the configuration: .*attn_gate.value.weight is unexp"):
        from_torch(to_torch(params, config), replace(config, gate="none"))
