import json

import fault_points
import pytest
import torch
from damage import some_flips
from errors import rejects
from retrofit_models import adapt, logits, stir, tiny

from tidegate._json import add_checksum
from tidegate.torch.gate import gate_parameters
from tidegate.torch.retrofit import add_gates, files, load_gates, save_gates
from tidegate.torch.retrofit.files import base_fingerprint


@pytest.fixture
def saved(tmp_path):
    """A directory with the gates of a small Llama, and its logits."""
    model = tiny("llama")
    add_gates(model, "g1+bma", layers=[0])
    add_gates(model, "g1-head", layers=[1])
    stir(model)
    save_gates(model, tmp_path / "gates")
    return tmp_path / "gates", logits(model)


def test_gates_that_were_saved_come_back(saved):
    directory, expected = saved
    model, present = tiny("llama"), tiny("llama")
    load_gates(model, directory)
    assert torch.equal(logits(model), expected)
    add_gates(present, "g1+bma", layers=[0])
    add_gates(present, "g1-head", layers=[1])
    load_gates(present, directory)
    assert torch.equal(logits(present), expected)
    assert sorted(path.name for path in directory.iterdir()) == ["gates.json", "gates.safetensors"]


@pytest.fixture
def cast_gates():
    """A function that builds a bfloat16 model with gates of another dtype."""

    def make(dtype):
        model = tiny("llama", dtype=torch.bfloat16)
        add_gates(model, "g1")
        for weight in gate_parameters(model):
            weight.data = weight.data.to(dtype)
        return model

    return make


def test_new_gates_have_the_dtype_that_was_saved(cast_gates, tmp_path):
    model = stir(cast_gates(torch.float32))
    save_gates(model, tmp_path)
    again = tiny("llama", dtype=torch.bfloat16)
    load_gates(again, tmp_path)
    assert {weight.dtype for weight in gate_parameters(again)} == {torch.float32}
    assert torch.equal(logits(again), logits(model))


def test_gates_that_stand_already_keep_their_dtype_and_round_nothing(cast_gates, tmp_path):
    save_gates(stir(cast_gates(torch.float32)), tmp_path / "fine")
    save_gates(stir(cast_gates(torch.bfloat16)), tmp_path / "coarse")
    model = cast_gates(torch.bfloat16)
    with rejects("model", hint="remove_gates(model)") as caught:
        load_gates(model, tmp_path / "fine")
    assert caught.value.got == "torch.bfloat16"
    assert not any(weight.any() for weight in gate_parameters(model))
    finer = cast_gates(torch.float32)
    for each in (model, finer):
        load_gates(each, tmp_path / "coarse")
    assert {weight.dtype for weight in gate_parameters(finer)} == {torch.float32}
    assert torch.equal(logits(finer), logits(model))


OTHER = "belong to one with another configuration or other weights"


@pytest.mark.parametrize(
    ("other", "got", "reason"),
    [
        (lambda: tiny("llama", seed=1), "LlamaForCausalLM in torch.float32", OTHER),
        (lambda: tiny("llama", rms_norm_eps=1e-3), "LlamaForCausalLM in torch.float32", OTHER),
        (lambda: tiny("llama", dtype=torch.bfloat16), "LlamaForCausalLM in torch.bfloat16", "in torch.float32"),
        (lambda: tiny("mistral"), "MistralForCausalLM in torch.float32", "a LlamaForCausalLM"),
    ],
    ids=["weights", "configuration", "dtype", "class"],
)
def test_another_model_is_named_and_stays_as_it_is(saved, other, got, reason):
    model = other()
    with rejects("model", hint=reason) as caught:
        load_gates(model, saved[0])
    assert caught.value.got == got
    assert not any("attn_gate" in name for name in model.state_dict())


def test_the_fingerprint_knows_the_base_under_gates_and_adapters():
    model = tiny("llama")
    expected = base_fingerprint(model)
    add_gates(model, "bma")
    assert base_fingerprint(adapt(stir(model))) == expected
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.base_layer.weight[0, 0] += 1
    assert base_fingerprint(model) != expected


@pytest.mark.parametrize("name", ["gates.json", "gates.safetensors"])
def test_a_flipped_bit_is_noticed_unless_it_changes_nothing(saved, name):
    directory, _ = saved
    path = directory / name
    content, accepted = path.read_bytes(), 0
    whole = files._read(directory)[0]
    for changed in some_flips(content, 150):
        path.write_bytes(changed)
        try:
            description, _ = files._read(directory)
        except ValueError:
            continue
        accepted += 1
        assert description == whole
    # Changed whitespace in JSON may be accepted.
    assert accepted < (30 if name == "gates.json" else 1)


def test_a_save_that_is_broken_off_between_its_files_is_noticed(saved, monkeypatch):
    directory, _ = saved
    model = tiny("llama")
    add_gates(model, "g1")
    fault_points.ask_for(monkeypatch, "file:before-move", count=2)
    with pytest.raises(OSError, match="space"):
        save_gates(model, directory)
    with rejects("directory", hint="Save the gates again"):
        load_gates(tiny("llama"), directory)


@pytest.mark.parametrize(
    ("change", "field", "reason"),
    [
        (lambda path: path.unlink(), "directory", "gates.json is missing"),
        (lambda path: path.write_text("{"), "gates.json", "save_gates"),
        (lambda path: path.write_text("[" * 100_000), "gates.json", "nested too deeply"),
        (lambda path: path.write_text("[]"), "gates.json", "save_gates"),
        (lambda path: edit(path, version=1), "gates.json", "save_gates"),
        (lambda path: edit(path, fingerprint=None), "gates.json", "fingerprint"),
        (lambda path: edit(path, layers=[]), "gates.json", "layers"),
        (lambda path: edit(path, layers={"a": [{"rank": "2"}]}), "gates.json", "layers.a[0].rank"),
        (lambda path: edit(path, layers={"a": [{"site": "sea"}]}), "gates.json", "layers.a[0].site"),
        (
            lambda path: path.write_text(path.read_text().replace("LlamaFor", "MistralFor")),
            "gates.json",
            "changed or damaged",
        ),
    ],
    ids=["missing", "no JSON", "depth", "no object", "version", "a field less", "a list", "rank", "site", "changed"],
)
def test_what_is_wrong_with_a_description_is_named(saved, change, field, reason):
    change(saved[0] / "gates.json")
    with rejects(field, hint=reason):
        load_gates(tiny("llama"), saved[0])


def edit(path, **changes):
    """Change entries of a description and its checksum; None removes an entry."""
    description = json.loads(path.read_text()) | changes
    kept = {name: value for name, value in description.items() if value is not None and name != "digest"}
    path.write_text(json.dumps(add_checksum(kept)))


def test_gates_of_a_description_that_do_not_fit_are_not_added(saved):
    path = saved[0] / "gates.json"
    layers = json.loads(path.read_text())["layers"]
    edit(path, layers={"elsewhere": layers["model.layers.0.self_attn"], **layers})
    model = tiny("llama")
    with rejects("layers", hint="model.layers.0.self_attn, model.layers.1.self_attn") as caught:
        load_gates(model, saved[0])
    assert caught.value.got == ["elsewhere"]
    layers["model.layers.1.self_attn"][0]["grain"] = "element"
    edit(path, layers=layers)
    with pytest.raises(ValueError, match="has shape"):
        load_gates(model, saved[0])
    assert not any("attn_gate" in name for name in model.state_dict())
    assert model.config._attn_implementation == "sdpa"


def test_other_gates_and_no_gates_are_rejected(saved, tmp_path):
    model = tiny("llama")
    with rejects("model", hint="add_gates(model)"):
        save_gates(model, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    add_gates(model, "g1")
    with rejects("model", hint="remove_gates(model)"):
        load_gates(model, saved[0])


def test_tokens_that_a_trainer_writes_into_the_configuration_do_not_matter(tmp_path):
    model = tiny("llama")
    add_gates(model)
    stir(model)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.config, name, 60)
    save_gates(model, tmp_path)
    fresh = tiny("llama")
    load_gates(fresh, tmp_path)
    assert torch.equal(logits(fresh), logits(model))


def test_gates_that_were_added_to_a_part_are_saved_by_their_paths_in_the_whole(tmp_path):
    model = tiny("llama")
    add_gates(model.model, "g1+bma")
    stir(model)
    expected = logits(model)
    save_gates(model, tmp_path / "whole")
    save_gates(model.model, tmp_path / "part")
    whole, part = tiny("llama"), tiny("llama")
    load_gates(whole, tmp_path / "whole")
    load_gates(part.model, tmp_path / "part")
    assert torch.equal(logits(whole), expected)
    assert torch.equal(logits(part), expected)
