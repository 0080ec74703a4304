import numpy as np
import pytest
import torch
from closeness import assert_close
from errors import rejects
from torch import nn

from tidegate.geometry import GeometryError, input_chart, sectional_curvature
from tidegate.lab.models.curvature import model_curvature
from tidegate.lab.models.language_models import LanguageModel, load_language_model
from tidegate.lab.training.measurements import Sampling
from tidegate.torch import TransformerConfig, TransformerLM, save_model

TINY = {"d_model": 16, "num_layers": 2, "num_heads": 2, "max_length": 16}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("ours") / "model.safetensors"
    torch.manual_seed(0)
    save_model(TransformerLM(TransformerConfig(gate="g1", **TINY)), path)
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64)).save_pretrained(folder)
    return folder


def toy(layers):
    """A model of layers that map a sequence (1, T, 3) to one, fed with the tokens' values."""

    def run(window):
        x = torch.stack([window.double(), window.double() ** 2 / 10, torch.ones(window.shape).double()], dim=-1)
        for layer in layers:
            x = layer(x)

    parts = {"module": nn.ModuleList(layers), "run": run, "blocks": tuple(layers), "encode": list}
    return LanguageModel(name="toy", **parts, vocab_size=256, max_length=None)


class Bowl(nn.Module):
    """Every position's outputs are (a, b, a² + b² + c) of its inputs (a, b, c)."""

    def forward(self, x):
        a, b, c = x.unbind(dim=-1)
        return torch.stack([a, b, (a * a + b * b) + c], dim=-1)


class Affine(nn.Module):
    def forward(self, x):
        return x @ torch.eye(3, dtype=x.dtype).mul(2) + 1


def test_an_affine_layer_is_flat_and_a_curved_one_is_not():
    measured = model_curvature(
        toy([Affine(), Bowl()]), torch.tensor([[1, 2, 3]]), Sampling(part="block", num_positions=2, num_planes=4)
    )
    flat, curved = measured.layers
    assert flat.magnitude == 0
    assert curved.magnitude > 0
    assert flat.count == curved.count == 8


def test_a_layer_of_ours_has_the_curvature_of_its_input_chart(saved):
    model = load_language_model(saved)
    window = torch.arange(6)[None]
    seen = []
    hook = model.attentions()[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0][0]))
    model.run(window)
    hook.remove()
    measured = model_curvature(model, window, Sampling(num_positions=1, num_planes=1))
    chart = input_chart(model.attentions()[0].arrays(), seen[0].detach(), moving=1)
    u, v = np.random.default_rng(0).standard_normal((2, 1, 16))
    size = float((chart(chart.start) ** 2).sum().detach()) / 5
    expected = sectional_curvature(chart, chart.start, u, v, covariance=size, tangent="plane")
    assert_close(np.array(measured.layers[0].quantiles[2]), expected[0].detach(), what="gradient")


@pytest.mark.parametrize("part", ["attention", "block"])
def test_a_hugging_face_model_is_measured_layer_by_layer(llama, part):
    model, sampling = load_language_model(llama), Sampling(part=part, num_positions=2, num_planes=3)
    windows = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(0))
    measured = model_curvature(model, windows, sampling)
    assert [layer.layer for layer in measured.layers] == [0, 1]
    assert all(layer.count == 12 and layer.magnitude > 0 for layer in measured.layers)
    assert model_curvature(model, windows, sampling) == measured


def test_a_layer_without_a_second_derivative_is_named():
    class Step(nn.Module):
        def forward(self, x):
            return x.round()

    with pytest.raises(GeometryError, match="Layer 0"):
        model_curvature(toy([Step()]), torch.tensor([[1, 2, 3]]), Sampling(part="block"))


def test_blocks_without_a_known_attention_are_rejected_with_a_remedy():
    with rejects("model", hint="part='block'"):
        model_curvature(toy([Affine()]), torch.tensor([[1, 2, 3]]))
