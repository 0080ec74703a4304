import importlib.util
import sys
from contextlib import nullcontext
from types import ModuleType

import model_types
import pytest
import torch
import transformers
from closeness import assert_close
from peft import LoraConfig, get_peft_model
from retrofit_models import inputs_of, logits, stir, tiny
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tidegate.torch.retrofit import add_gates, export_apart, export_gated, to_laguna, to_qwen3_next, to_step3p7

WINDOWS = {
    "sliding_window": 4,
    "use_sliding_window": True,
    "layer_types": ["sliding_attention", "full_attention"],
}


def gated(gate, activation="twosigmoid", *, layers=None, **options):
    """A small Qwen3 with stirred gates and with norms that are not all ones."""
    model = tiny("qwen3", **options)
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(mean=1.0, std=0.2, generator=generator)
    add_gates(model, gate, activation, layers)
    return stir(model)


@pytest.mark.parametrize("options", [{}, WINDOWS, {"layers": [1]}, {"tie_word_embeddings": True}])
@pytest.mark.parametrize("activation", ["twosigmoid", "tanh1"])
def test_gates_of_one_number_a_head_become_those_of_step(activation, options):
    model = gated("output:input:head:r2", activation, **options)
    with pytest.warns(UserWarning, match="load it from a folder by AutoModelForImageTextToText"):
        exported = to_step3p7(model)
    assert exported.model.language_model.layers[0].self_attn.g_proj.weight.shape == (4, 32)
    assert_close(logits(exported), logits(model), what="forward")


@pytest.mark.parametrize("options", [{}, WINDOWS, {"layers": [0]}, {"attention_bias": True}])
@pytest.mark.parametrize("gate", ["output:input:softplus", "output:input:head:softplus:w5"])
def test_softplus_gates_become_those_of_laguna(gate, options):
    model = gated(gate, None, **options)
    assert_close(logits(to_laguna(model)), logits(model), what="forward")


@pytest.mark.parametrize(
    ("gate", "activation", "options", "architecture"),
    [
        ("g1", "twosigmoid", {}, "Qwen3NextForCausalLM"),
        ("g1-head", "twosigmoid", WINDOWS, "Step3p7ForConditionalGeneration"),
        ("output:input:softplus", None, WINDOWS, "LagunaForCausalLM"),
    ],
)
def test_the_architecture_is_chosen_by_what_fits(gate, activation, options, architecture):
    model = gated(gate, activation, **options)
    warned = pytest.warns(UserWarning, match="AutoModelForImageTextToText") if "Step" in architecture else nullcontext()
    with warned:
        exported = export_gated(model)
    assert type(exported).__name__ == architecture
    assert_close(logits(exported), logits(model), what="forward")


def test_the_exported_model_can_be_saved_and_loaded_by_others(tmp_path):
    model = gated("output:input:softplus", None, **WINDOWS)
    to_laguna(model).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    prompt = inputs_of(model, length=5)
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    assert torch.equal(loaded.generate(**prompt, **options), model.generate(**prompt, **options))


@pytest.mark.filterwarnings("ignore:.* is exported to Step3p7")
def test_step_is_loaded_by_the_class_that_the_warning_names(tmp_path):
    model = gated("g1-head")
    to_step3p7(model).save_pretrained(tmp_path)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    assert_close(logits(loaded), logits(model), what="forward")
    with pytest.raises(ValueError, match="Step3p7Config"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def adapted(*, around):
    model = gated("g1")
    wrapper = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    return wrapper if around else model


def of_type(model_type, gate="g1-head"):
    model = model_types.build(model_type)
    add_gates(model, gate)
    return model


REFUSED = {
    "adapters around": (lambda: adapted(around=True), r"is a PeftModel around a Qwen3ForCausalLM\. Merge the adapters"),
    "adapters inside": (lambda: adapted(around=False), r"has adapters inside\. Merge the adapters first"),
    "no gates": (lambda: tiny("qwen3"), r"Qwen3ForCausalLM has no gates to export; call add_gates\(model\) first"),
    "experts": (
        lambda: of_type("qwen3_moe"),
        r"model\.layers\.0\.mlp\.experts is a mixture of experts.* save_pretrained",
    ),
    "a norm over all heads": (
        lambda: of_type("olmo2"),
        r"q_norm of model\.layers\.0\.self_attn normalises 32 channels",
    ),
}


@pytest.mark.parametrize("convert", [export_gated, to_qwen3_next, to_step3p7, to_laguna])
@pytest.mark.parametrize(("make", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_model_that_cannot_be_exported_is_told_the_reason_alone(make, reason, convert):
    with pytest.raises(ValueError, match=f"^(model |.*cannot be exported: |){reason}") as refused:
        convert(make())
    assert "fits no architecture" not in str(refused.value)


def test_merged_adapters_are_exported():
    wrapper = adapted(around=True)
    with torch.no_grad():
        for name, weight in wrapper.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    expected = logits(wrapper)
    assert_close(logits(export_gated(wrapper.merge_and_unload())), expected, what="forward")


@pytest.mark.parametrize(
    ("convert", "gate", "activation", "reason"),
    [
        (to_step3p7, "g1", "twosigmoid", "has a gate for each channel; Step-3.7 has one for each head"),
        (to_step3p7, "output:input:head:b0", "twosigmoid", "has a gate with a bias; that of Step-3.7 has none"),
        (to_laguna, "g1", "twosigmoid", "only softplus can be written as that of Laguna"),
        (to_laguna, "bma", "twosigmoid", "Laguna has one, at the output, that reads the input"),
    ],
)
def test_gates_that_do_not_fit_are_refused(convert, gate, activation, reason):
    with pytest.raises(ValueError, match=reason):
        convert(gated(gate, activation))


def test_a_model_that_fits_no_architecture_is_told_each_reason():
    model = tiny("llama")
    add_gates(model, "g1")
    with pytest.raises(ValueError, match=r"keep them with save_pretrained\. .*q_norm.*for each head.*softplus"):
        export_gated(model)
    with pytest.raises(ValueError, match="has no gates to export"):
        to_laguna(tiny("qwen3"))


class OlderTransformers(ModuleType):
    """A transformers from before Step-3.7 and Laguna."""

    __version__ = "5.0.0"

    def __getattr__(self, name):
        if name.startswith(("Step3p7", "Laguna")):
            raise AttributeError(name)
        return getattr(transformers, name)


def test_an_older_transformers_is_no_hindrance_until_its_lack_matters(monkeypatch):
    spec = importlib.util.spec_from_file_location("export_apart_again", export_apart.__file__)
    again = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, again)
    monkeypatch.setitem(sys.modules, "transformers", OlderTransformers("transformers"))
    spec.loader.exec_module(again)
    assert type(again.export_gated(gated("g1"))).__name__ == "Qwen3NextForCausalLM"
    with pytest.raises(ValueError, match=r"transformers 5\.0\.0 has no Laguna; install a newer one"):
        again.export_gated(gated("output:input:softplus", None))
