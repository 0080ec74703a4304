from dataclasses import replace

import numpy as np
import pytest
import torch
from errors import rejects
from layers import make_layer

from tidegate.config import TransformerConfig
from tidegate.experts.channel_gauge import channel_gauge, model_gauge
from tidegate.experts.gauge import FREE_BELOW, random_layer
from tidegate.experts.torch_adapter import layer_jacobian
from tidegate.experts.transform import random_gauge
from tidegate.sizes import HeadShape
from tidegate.torch import TransformerLM

GATES = ("none", "g1", "g1-head", "g2", "bma", "bma-query", "g3", "g4", "g1+g5", "output:nothing", "value:nothing+g5")


def inputs(*shape):
    return np.random.default_rng(0).standard_normal(shape)


def free_by_the_jacobian(layer, x):
    """How many directions of each group's own value and output projections change nothing, all else held still."""
    free = []
    for group in range(2):
        entries = {name: np.arange(getattr(layer, name).size).reshape(2, -1)[group] for name in ("W_V", "W_O")}
        jacobian = np.concatenate(list(layer_jacobian(layer, x, entries).values()), axis=1)
        values = np.linalg.svd(jacobian, compute_uv=False)
        free.append(jacobian.shape[1] - int(np.sum(values > FREE_BELOW * values[0])))
    return tuple(free)


@pytest.mark.parametrize("gate", GATES)
def test_all_free_directions_of_a_head_are_mixtures_of_its_channels(gate):
    layer = make_layer(gate, scale=50.0)
    x = inputs(6, 5, 6)
    found = channel_gauge(layer, x)
    assert found.free == free_by_the_jacobian(layer, x)
    assert found.predicted == (None if "nothing" in gate else found.free[0])
    assert found.singular_values.shape == (2, 16)


@pytest.mark.parametrize("gate", ["none", "g1", "g2", "g5+bma"])
def test_values_are_the_outputs_change_that_the_output_projection_cannot_undo(gate):
    rng = np.random.default_rng(3)
    layer = random_layer(gate, HeadShape.of(d_model=6, num_heads=4, num_kv_heads=2, head_dim=3), rng)
    x = rng.standard_normal((2, 8, 6))

    def slopes(name, directions):
        # The output is linear in each of the two projections.
        moved = [replace(layer, **{name: getattr(layer, name) + change})(x) - layer(x) for change in directions]
        return np.stack([change.ravel() for change in moved], axis=1)

    mixtures = np.stack([layer.W_V[0] @ A for A in np.eye(9).reshape(9, 3, 3)])
    by_value = slopes("W_V", np.stack([mixtures, 0 * mixtures], axis=1))
    own = np.arange(layer.W_O.size) < layer.W_O.size // 2
    by_output = slopes("W_O", np.eye(layer.W_O.size)[own].reshape(-1, *layer.W_O.shape))
    left = by_value - by_output @ np.linalg.lstsq(by_output, by_value, rcond=1e-12)[0]
    tangent = mixtures.reshape(9, -1).T
    expected = np.linalg.svd(left @ np.linalg.inv(np.linalg.qr(tangent, mode="r")), compute_uv=False)
    scale = np.linalg.norm(np.swapaxes(layer.trace(x).heads[:, :2], 1, 2).reshape(16, -1), ord=2)
    np.testing.assert_allclose(channel_gauge(layer, x).singular_values[0], expected / scale, atol=1e-10)


def test_free_directions_do_not_depend_on_the_point_of_the_orbit():
    rng = np.random.default_rng(1)
    layer = random_layer("g1", HeadShape.of(d_model=12, num_heads=3), rng)
    x = rng.standard_normal((2, 8, 12))
    assert channel_gauge(layer, x).free == channel_gauge(random_gauge(layer, rng), x).free == (4, 4, 4)


@pytest.mark.parametrize("gate", ["none", "bma"])
def test_a_model_is_taken_layer_by_layer_and_left_as_it_was(gate):
    torch.manual_seed(0)
    config = TransformerConfig(gate=gate, d_model=16, num_layers=2, num_heads=4, vocab_size=40, max_length=32)
    model = TransformerLM(config)
    tokens = torch.randint(40, (2, 32))
    found = model_gauge(model, tokens)
    assert [layer.layer for layer in found] == ["stack.blocks.0.attention", "stack.blocks.1.attention"]
    assert all(layer.gate == gate and layer.singular_values.shape == (4, 16) for layer in found)
    assert all(layer.free == (layer.predicted,) * 4 for layer in found)
    assert found[0].predicted == (16 if gate == "none" else 4)
    assert model.training
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_what_cannot_be_measured_is_rejected():
    with rejects("layer", hint="gauge_report"):
        channel_gauge(make_layer("vga"), inputs(2, 5, 6))
    with rejects("x"):
        channel_gauge(make_layer("none"), inputs(1, 3, 6))
    with rejects("model"):
        model_gauge(torch.nn.Linear(2, 2), torch.zeros(1, 2))
