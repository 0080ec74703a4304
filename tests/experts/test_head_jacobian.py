import numpy as np
import pytest
from layers import make_layer

from tidegate.experts.head_jacobian import evenly_spaced_positions, value_singular_values
from tidegate.experts.torch_adapter import layer_jacobian

SIZES = {
    "grouped": {},
    "few heads of a wide model": {"d": 9, "H": 2, "G": 2, "h": 2},
    "everything": {"full": True},
}
GATES = ("none", "g1", "g1-head", "g2", "bma", "bma-query", "g3", "g5", "value:input:add:b0", "g1+g2+g5")


@pytest.mark.parametrize("options", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("gate", GATES)
def test_singular_values_are_those_of_the_whole_jacobian(gate, options):
    layer = make_layer(gate, **options)
    x = np.random.default_rng(0).standard_normal((2, 8, layer.shape.d_model))
    found = value_singular_values(layer, x)
    groups = layer.shape.num_kv_heads
    for group, values in enumerate(found):
        entries = {name: np.arange(layer.parameters()[name].size).reshape(groups, -1)[group] for name in ("W_V", "W_O")}
        jacobian = np.concatenate(list(layer_jacobian(layer, x, entries).values()), axis=1)
        whole = np.linalg.svd(jacobian, compute_uv=False)
        assert len(values) == jacobian.shape[1]
        np.testing.assert_allclose(values[: len(whole)], whole, atol=1e-12 * whole[0])
        assert not values[len(whole) :].any()


def test_positions_are_spread_over_all_sequences():
    rows, places = evenly_spaced_positions((4, 10), 8)
    assert set(rows) == {0, 1, 2, 3}
    assert len(rows) == len(places) == 8
    assert len(evenly_spaced_positions((2, 3), 100)[0]) == 6
