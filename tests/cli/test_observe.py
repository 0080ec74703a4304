import json

import numpy as np
import pytest
import torch
from pages import require_policy
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from tidegate.cli import app
from tidegate.torch import TransformerConfig, TransformerLM, save_model
from tidegate.torch.observing.observation import Observation
from tidegate.torch.retrofit import add_gates, save_gates

runner = CliRunner()

QUICK = ["--length", "8", "--sequences", "5", "--batch-size", "2"]
SIZES = {"d_model": 16, "num_layers": 2, "num_heads": 2}


def invoke(*arguments):
    return runner.invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    save_model(TransformerLM(TransformerConfig(gate="g1", **SIZES)), place / "model.safetensors")
    save_model(TransformerLM(TransformerConfig(gate="none", vocab_size=300, **SIZES)), place / "many.safetensors")
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=16,
    )
    LlamaForCausalLM(config).save_pretrained(place / "llama")
    (place / "notes.txt").write_text("the sea rises and the gate falls. " * 9)
    np.save(place / "tokens.npy", np.random.default_rng(0).integers(0, 60, 400).astype(np.uint8))
    return place


def seen_in(out):
    data = json.loads((out / "results.json").read_text())
    return data, Observation.from_json(json.dumps(data["observation"]))


def test_terminal_page_and_json_agree(folder, tmp_path):
    done = invoke("observe", folder / "model.safetensors", "--data", folder / "notes.txt", "--out", tmp_path, *QUICK)
    assert done.exit_code == 0, done.output
    data, seen = seen_in(tmp_path)
    assert (data["num_sequences"], data["length"], seen.num_batches) == (5, 8, 3)
    assert seen.table() in done.stdout
    for layer in seen.layers:
        assert layer.num_heads == 2
        assert set(layer.gates) == {"output"}
        for head in range(2):
            assert f"{layer.heads['mass'][head].mean:.3f}" in (tmp_path / "report.md").read_text()
    require_policy((tmp_path / "report.html").read_text())


def test_a_hugging_face_folder_is_observed_in_its_own_dtype(folder, tmp_path):
    done = invoke("observe", folder / "llama", "--data", folder / "tokens.npy", "--heat", "--out", tmp_path, *QUICK)
    assert done.exit_code == 0, done.output
    _, seen = seen_in(tmp_path)
    assert [layer.name for layer in seen.layers] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert all(layer.num_heads == 4 and "heat_capacity" in layer.heads for layer in seen.layers)


@pytest.mark.parametrize("verb", ["observe", "curvature"])
def test_added_gates_are_named_or_refused(folder, tmp_path, verb):
    model = LlamaForCausalLM.from_pretrained(folder / "llama")
    add_gates(model)
    model.save_pretrained(tmp_path / "gated")
    save_gates(model, tmp_path / "gates")
    options = ["--data", folder / "tokens.npy", "--out", tmp_path / "out", "--length", "6", "--sequences", "1"]
    refused = invoke(verb, tmp_path / "gated", *options)
    assert refused.exit_code == 2
    assert "save_gates" in refused.stderr
    done = invoke(verb, folder / "llama", "--gates", tmp_path / "gates", *options)
    assert done.exit_code == 0, done.output
    if verb == "observe":
        _, seen = seen_in(tmp_path / "out")
        assert [set(layer.gates) for layer in seen.layers] == [{"output"}, {"output"}]


def test_the_default_length_is_that_of_the_training_or_the_models_limit(folder, tmp_path):
    save_model(TransformerLM(TransformerConfig(gate="g1", max_length=24, **SIZES)), tmp_path / "short.safetensors")
    for model, length in ((tmp_path / "short.safetensors", 24), (folder / "llama", 16)):
        done = invoke("observe", model, "--data", folder / "tokens.npy", "--sequences", 1, "--out", tmp_path / "out")
        assert done.exit_code == 0, done.output
        assert seen_in(tmp_path / "out")[0]["length"] == length


def test_progress_is_plain_lines_on_the_error_stream_and_silent_if_asked(folder, tmp_path):
    arguments = ["observe", folder / "model.safetensors", "--data", folder / "notes.txt", "--out", tmp_path, *QUICK]
    assert invoke(*arguments).stderr == "observing: 5 of 5 sequences\n"
    assert invoke(*arguments, "--quiet").stderr == ""


BAD = [
    (["nowhere"], "an existing file or folder"),
    (["notes.txt"], "a safetensors file"),
    (["."], "It has 2 .safetensors files"),
    (["model.safetensors", "--data", "nowhere.txt"], "nowhere.txt"),
    (["many.safetensors", "--data", "notes.txt"], "a .npy file of tokens"),
    (["model.safetensors", "--data", "tokens.npy", "--length", "1000"], "Give more text"),
    (["llama", "--data", "tokens.npy", "--length", "17"], "at most 16, the positions of"),
    (["broken", "--data", "tokens.npy", "--length", "8"], "broken"),
]


@pytest.mark.parametrize(
    ("verb", "arguments", "reason"),
    [
        *((verb, *bad) for verb in ("observe", "curvature") for bad in BAD),
        ("observe", ["model.safetensors", "--data", "tokens.npy", "--length", "8", "--keys", "9"], "keys"),
    ],
)
def test_bad_input_is_one_line_and_the_exit_code_2(folder, tmp_path, monkeypatch, verb, arguments, reason):
    monkeypatch.chdir(folder)
    (folder / "broken").mkdir(exist_ok=True)
    (folder / "broken" / "config.json").write_text((folder / "llama" / "config.json").read_text())
    (folder / "broken" / "model.safetensors").write_bytes(b"not tensors")
    done = invoke(verb, *arguments, "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert reason in done.stderr
    assert not (tmp_path / "out").exists()


def test_an_interrupt_ends_with_130_and_leaves_nothing(folder, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(TransformerLM, "forward", interrupted)
    out = tmp_path / "out"
    done = invoke("observe", folder / "model.safetensors", "--data", folder / "notes.txt", "--out", out, *QUICK)
    assert done.exit_code == 130
    assert done.stderr.startswith("Interrupted. ")
    assert not out.exists()
