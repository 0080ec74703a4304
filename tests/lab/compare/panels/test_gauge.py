from tidegate.lab.compare.panels.gauge import gauge_panels
from tidegate.lab.training.measurements import LayerGauge


def layer(free, values, predicted):
    return LayerGauge(layer="0", free=free, predicted=predicted, singular_values=tuple(map(tuple, values)))


NONE = layer((4, 4), [[0.0] * 4] * 2, 4)
GATED = layer((2, 1), [[0.4, 0.2, 0.0, 0.0], [0.6, 0.4, 0.1, 0.0]], 2)


def test_free_directions_stand_beside_the_theory_for_every_layer():
    table, _, _ = gauge_panels({"none": [NONE], "g1": [GATED, NONE]})
    assert [row[:6] for row in table.rows] == [
        ("none", 0, 4, 4, 4, 4),
        ("g1", 0, 4, 2, 1, 2),
        ("g1", 1, 4, 4, 4, 4),
    ]
    assert table.rows[0][6:] == (None, None)
    assert table.rows[1][6:] == ("4.0e-01", "1.0e-01")


def test_maps_show_shares_by_layer_and_head():
    _, maps, _ = gauge_panels({"none": [NONE], "g1": [GATED]})
    assert [each.values for each in maps.maps] == [((1.0, 1.0),), ((0.5, 0.25),)]
    assert "none 1.00 to 1.00; g1 0.25 to 0.50" in maps.title


def test_free_directions_are_not_drawn_on_a_logarithmic_axis():
    _, _, lines = gauge_panels({"none": [NONE], "g1": [GATED]})
    # A layer of which all is free has no line.
    (gated,) = lines.series
    assert gated.y == (0.5, 0.30000000000000004, 0.05, None)
    assert gated.x == (1, 2, 3, 4)


def test_no_models_make_no_panels():
    assert gauge_panels({}) == gauge_panels({"none": []}) == ()
