import json
from functools import partialmethod

import model_types
import pytest
import torch
from errors import rejects
from retrofit_models import inputs_of, logits, stir, tiny
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from tidegate.torch import gate_parameters
from tidegate.torch.retrofit import (
    add_gates,
    freeze_all_but_gates,
    load_pretrained,
    remove_gates,
    save_gates,
    save_pretrained,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_a_saved_gated_model_is_loaded_with_its_bits(tmp_path, family, dtype):
    model = tiny(family, dtype=dtype)
    add_gates(model, "bma+g1-head")
    stir(model)
    save_pretrained(model, tmp_path)
    again = load_pretrained(tmp_path)
    assert type(again) is type(model)
    assert again.dtype == dtype
    assert not again.training
    assert torch.equal(logits(again), logits(model))
    # Weights have the same permissions as the configuration.
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1


@pytest.mark.parametrize("model_type", ["bloom", "gemma3", "bart"])
def test_types_of_all_kinds_are_loaded_without_their_code(tmp_path, model_type):
    model = model_types.build(model_type)
    add_gates(model, "g1")
    stir(model)
    save_pretrained(model, tmp_path)
    assert not list(tmp_path.glob("*.py"))
    inputs = model_types.inputs_of(model)
    with torch.no_grad():
        assert torch.equal(load_pretrained(tmp_path)(**inputs).logits, model(**inputs).logits)


def test_a_loaded_model_generates_and_is_trainable(tmp_path):
    model = tiny("llama", tie_word_embeddings=True)
    add_gates(model, "g1")
    stir(model)
    save_pretrained(model, tmp_path)
    again = load_pretrained(str(tmp_path))
    prompt = inputs_of(model, length=5)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    assert torch.equal(again.generate(**prompt, **options), model.generate(**prompt, **options))
    again(**prompt, labels=prompt["input_ids"]).loss.backward()
    assert all(weight.grad is not None for name, weight in again.named_parameters() if "attn_gate" in name)


def test_transformers_loads_the_model_without_gates_only_on_request(tmp_path):
    model = tiny("llama")
    add_gates(model, "g1")
    stir(model)
    save_pretrained(model, tmp_path)
    with pytest.raises(OSError, match="no file"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, variant="without_gates")
    remove_gates(model)
    assert torch.equal(logits(plain.eval()), logits(model))


def test_a_model_without_gates_in_the_folder_is_not_joined_by_a_gated_one(tmp_path):
    model = tiny("llama")
    model.save_pretrained(tmp_path)
    before = sorted(tmp_path.iterdir())
    add_gates(model, "g1")
    with rejects("directory", hint="load model.safetensors without the gates"):
        save_pretrained(model, tmp_path)
    assert sorted(tmp_path.iterdir()) == before
    save_gates(model, tmp_path)
    assert torch.equal(logits(load_pretrained(tmp_path)), logits(model))


def test_a_gated_model_in_shards_is_loaded_with_its_bits(tmp_path, monkeypatch):
    model = tiny("llama")
    add_gates(model, "bma+g1")
    stir(model)
    monkeypatch.setattr(type(model), "save_pretrained", partialmethod(type(model).save_pretrained, max_shard_size=9000))
    save_pretrained(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    for folder in (tmp_path / "ours", tmp_path / "theirs"):
        assert len(list(folder.glob("model*-of-*.safetensors"))) > 2
        assert torch.equal(logits(load_pretrained(folder)), logits(model))


@pytest.mark.parametrize("model_type", ["llama", "bloom", "gemma3", "bart", "mixtral"])
def test_what_transformers_wrote_of_a_gated_model_is_loaded_with_its_gates(tmp_path, model_type):
    model = model_types.build(model_type)
    add_gates(model, "bma", layers=[0])
    add_gates(model, "g1-head", layers=[1])
    stir(model)
    model.save_pretrained(tmp_path)
    again = load_pretrained(tmp_path)
    inputs = model_types.inputs_of(model)
    with torch.no_grad():
        assert torch.equal(again(**inputs).logits, model(**inputs).logits)
    assert not again.training


def test_the_checkpoint_of_a_trainer_is_loaded_with_its_gates(tmp_path):
    model = tiny("llama")
    add_gates(model, "g1")
    freeze_all_but_gates(model)
    rows = [{"input_ids": row, "labels": row} for row in inputs_of(model)["input_ids"]]
    options = TrainingArguments(
        tmp_path, max_steps=2, save_steps=2, learning_rate=0.1, report_to="none", disable_tqdm=True, use_cpu=True
    )
    Trainer(model=model, args=options, train_dataset=rows).train()
    again = load_pretrained(tmp_path / "checkpoint-2")
    assert any(weight.any() for weight in gate_parameters(again))
    assert torch.equal(logits(again), logits(model.eval()))


def test_a_model_says_in_its_configuration_which_gates_it_has():
    model = tiny("llama")
    other = LlamaForCausalLM(model.config)
    model.name_or_path = model.config.name_or_path = "somebody/llama"
    add_gates(model, "bma", layers=[1])
    add_gates(model, "g1", layers=[0])
    spelled = {"model.layers.0.self_attn": "output:input:twosigmoid:s0"}
    assert model.config.tidegate_gates == {**spelled, "model.layers.1.self_attn": "value:query:twosigmoid:s0"}
    assert model.name_or_path == ""
    assert not hasattr(other.config, "tidegate_gates")
    remove_gates(model)
    assert not hasattr(model.config, "tidegate_gates")
    assert model.name_or_path == "somebody/llama"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_is_loaded_in_another_dtype_as_transformers_does(tmp_path, dtype):
    model = tiny("llama")
    add_gates(model, "g1")
    save_pretrained(model, tmp_path)
    cast = load_pretrained(tmp_path, dtype=dtype, device="cpu")
    assert {weight.dtype for weight in cast.parameters()} == {dtype}
    plain = LlamaForCausalLM.from_pretrained(tmp_path, variant="without_gates", dtype=dtype)
    assert torch.equal(logits(cast), logits(plain.eval()))


@pytest.mark.parametrize("model_type", ["llama", "gemma3", "mixtral"])
@pytest.mark.parametrize("ours", [True, False])
def test_gates_that_are_finer_than_their_model_are_not_rounded(tmp_path, model_type, ours):
    plain = model_types.build(model_type)
    plain.save_pretrained(tmp_path / "plain")
    model = type(plain).from_pretrained(tmp_path / "plain", dtype=torch.bfloat16).eval()
    add_gates(model, "g1")
    for weight in gate_parameters(model):
        weight.data = weight.data.float()
    stir(model)
    if ours:
        save_pretrained(model, tmp_path / "gated")
    else:
        model.save_pretrained(tmp_path / "gated")
    again = load_pretrained(tmp_path / "gated")
    assert again.dtype == torch.bfloat16
    assert {weight.dtype for weight in gate_parameters(again)} == {torch.float32}
    assert all(map(torch.equal, gate_parameters(again), gate_parameters(model)))
    inputs = model_types.inputs_of(model)
    with torch.no_grad():
        assert torch.equal(again(**inputs).logits, model(**inputs).logits)
    cast = load_pretrained(tmp_path / "gated", dtype=torch.float64)
    assert all(map(torch.equal, gate_parameters(cast), [weight.double() for weight in gate_parameters(model)]))


@pytest.mark.parametrize("loaded", [True, False])
def test_half_precision_keeps_its_bits_if_it_was_loaded_so(tmp_path, loaded):
    tiny("llama").save_pretrained(tmp_path / "plain")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16 if loaded else None).eval()
    model = model if loaded else model.bfloat16()
    add_gates(model)
    save_pretrained(model, tmp_path / "gated")
    again = load_pretrained(tmp_path / "gated")
    inputs = inputs_of(model, length=60)
    assert again.dtype == model.dtype == torch.bfloat16
    # `bfloat16` also rounds the rotary frequencies, which are not saved.
    assert torch.equal(logits(again, inputs), logits(model, inputs)) == loaded


def test_gates_without_a_word_of_which_are_named_with_the_way_back(tmp_path):
    model = tiny("llama")
    add_gates(model, "g1")
    stir(model)
    model.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tidegate_gates": {}}))
    with rejects("tidegate_gates", hint="load_state_dict"):
        load_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    add_gates(again, "g1")
    again.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(logits(again), logits(model))
    config.write_text(json.dumps({**json.loads(config.read_text()), "tidegate_gates": ["g1"]}))
    with rejects("tidegate_gates"):
        load_pretrained(tmp_path)
    name = "model.layers.{}.self_attn.attn_gate.output.weight"
    spelled = {"tidegate_gates": {"model.layers.0.self_attn": "g1"}}
    config.write_text(json.dumps(json.loads(config.read_text()) | spelled))
    with pytest.raises(ValueError, match=name.format(1)):
        load_pretrained(tmp_path)
    spelled["tidegate_gates"]["model.layers.1.self_attn"] = "g1"
    config.write_text(json.dumps(json.loads(config.read_text()) | spelled))
    weights = load_file(tmp_path / "model.safetensors")
    whole = {name: weight.int() if "attn_gate" in name else weight for name, weight in weights.items()}
    save_file(whole, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with rejects(name.format(0)):
        load_pretrained(tmp_path)


def test_what_cannot_be_loaded_is_said(tmp_path):
    with rejects("directory", hint="config.json is missing"):
        load_pretrained(tmp_path)
    model = tiny("llama")
    with rejects("model", hint="add_gates(model)"):
        save_pretrained(model, tmp_path)
    model.save_pretrained(tmp_path)
    with rejects("directory", hint="neither files of gates nor gates among the weights"):
        load_pretrained(tmp_path)
    add_gates(model)
    save_pretrained(model, tmp_path / "gated")
    config = tmp_path / "gated" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["NobodysModel"]}))
    with rejects("architectures"):
        load_pretrained(tmp_path / "gated")


def test_arguments_are_checked_before_a_model_is_read():
    for dtype in ("bfloat16", torch.int8):
        with pytest.raises(TypeError, match="dtype"):
            load_pretrained("somebody/llama", dtype=dtype)
    with pytest.raises(RuntimeError, match="device"):
        load_pretrained("somebody/llama", device="nowhere")
    with rejects("directory", hint="snapshot_download"):
        load_pretrained("somebody/llama")


def test_other_weights_under_the_gates_are_noticed(tmp_path):
    model = tiny("llama")
    add_gates(model)
    save_pretrained(model, tmp_path)
    tiny("llama", seed=1).save_pretrained(tmp_path, variant="without_gates")
    with rejects("model", hint="another configuration or other weights"):
        load_pretrained(tmp_path)
    tiny("llama", seed=1).save_pretrained(tmp_path)
    with rejects("directory", hint="model.without_gates.safetensors and model.safetensors"):
        load_pretrained(tmp_path)
