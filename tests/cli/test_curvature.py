import json
import math

import pytest
import torch
from pages import require_policy
from typer.testing import CliRunner

from tidegate.cli import app
from tidegate.torch import TransformerConfig, TransformerLM, save_model

runner = CliRunner()

QUICK = ["--length", "6", "--sequences", "1", "--positions", "2", "--planes", "2"]


def invoke(*arguments):
    return runner.invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    save_model(
        TransformerLM(TransformerConfig(gate="bma", d_model=8, num_layers=2, num_heads=2)), place / "model.safetensors"
    )
    (place / "notes.txt").write_text("the sea rises and the gate falls. " * 9)
    return place


def test_terminal_page_and_json_agree(folder, tmp_path):
    done = invoke("curvature", folder / "model.safetensors", "--data", folder / "notes.txt", "--out", tmp_path, *QUICK)
    assert done.exit_code == 0, done.output
    layers = json.loads((tmp_path / "results.json").read_text())["layers"]
    assert len(layers) == 2
    digits = 2 - math.floor(math.log10(min(layer["magnitude"] for layer in layers)))
    for layer in layers:
        assert f"{layer['magnitude']:.3g}" in done.output
        assert f"{layer['quantiles'][2]:+.3g}" in done.output
        assert f"{layer['magnitude']:.{digits}f}" in (tmp_path / "report.md").read_text()
    require_policy((tmp_path / "report.html").read_text())
