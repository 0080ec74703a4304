import numpy as np
import pytest
import torch
from errors import rejects

from tidegate.torch import TransformerConfig, TransformerLM
from tidegate.torch.observing.figure import observation_figure
from tidegate.torch.observing.observation import Observation
from tidegate.torch.observing.watcher import observe


@pytest.fixture(scope="module")
def seen():
    torch.manual_seed(0)
    model = TransformerLM(TransformerConfig(gate="g1+g2", d_model=16, num_layers=3, num_heads=4, num_kv_heads=2)).eval()
    with torch.no_grad(), observe(model) as watcher:
        model(torch.randint(256, (2, 9)))
    return watcher.observation()


def axes_of(figure):
    return {axes.get_title(loc="left"): axes for axes in figure.axes if axes.get_title(loc="left")}


def test_maps_show_the_mean_of_every_head_and_gate(seen):
    axes = axes_of(observation_figure(seen))
    expected = {
        "first-key mass": [[each.mean for each in layer.heads["mass"]] for layer in seen.layers],
        "first-key contribution": [[each.mean for each in layer.heads["contribution"]] for layer in seen.layers],
        "entropy (nats)": [[each.mean for each in layer.heads["entropy"]] for layer in seen.layers],
        "mean gate, output": [layer.gates["output"].mean for layer in seen.layers],
        "mean gate, value": [layer.gates["value"].mean for layer in seen.layers],
    }
    assert set(axes) == {*expected, "first-key mass, by position", "entropy (nats), by position"}
    for title, values in expected.items():
        (image,) = axes[title].images
        assert np.allclose(image.get_array(), values, rtol=1e-12)


def test_a_figure_can_be_written_and_is_not_registered_with_pyplot(seen, tmp_path):
    from matplotlib import pyplot

    seen.figure().savefig(tmp_path / "seen.png")
    assert pyplot.get_fignums() == []
    with rejects("observation"):
        observation_figure(Observation(layers=(), num_batches=0, keys="the first key"))
