"""Observations of tiny models of every causal type of transformers equal the weights that their layers return."""

import model_types
import observed_types
import pytest
import torch
from transformers.utils import logging

from tidegate.torch.observing.watcher import observe

logging.set_verbosity_error()

FAMILIES = ("bloom", "deepseek_v2", "deepseek_v4", "gemma2", "gpt_oss", "gptj", "granite_swa", "hrm_text", "mpt")
FAMILIES += ("openai-gpt", "qwen3_next", "xglm", "xlnet")
"""Types for each way of interception: kernels, interface with sinks, caps and appended keys, separate operators."""
TYPES = [name for name in model_types.model_types() if name not in model_types.NOT_BUILT]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_statistics_are_those_of_the_weights(model_type):
    examined = observed_types.examine(model_type)
    assert examined.observed, examined.why
    assert examined.num_layers >= 1


@pytest.mark.full
@pytest.mark.parametrize("model_type", sorted(set(TYPES) - set(FAMILIES)))
def test_statistics_of_every_other_type_are_those_of_the_weights(model_type):
    examined = observed_types.examine(model_type)
    unobserved = {*observed_types.REASONS, *model_types.NO_ATTENTION}
    assert examined.observed == (model_type not in unobserved), examined.why


def test_the_comparison_notices_other_weights():
    model = model_types.build("gpt_oss")
    inputs = model_types.inputs_of(model, length=observed_types.LENGTH)
    (layer, _) = observed_types.observed(model, inputs).layers
    weights = observed_types.layer_weights(model, inputs, [layer.name])[layer.name]
    assert observed_types.distance(layer, weights) <= observed_types.CLOSE
    hotter = [((matrix**2 / (matrix**2).sum(-1, keepdim=True)), sink) for matrix, sink in weights]
    assert observed_types.distance(layer, hotter) > observed_types.CLOSE


@torch.no_grad()
def test_the_padding_of_xlnet_is_left_out():
    model = model_types.build("xlnet")
    inputs = model_types.inputs_of(model, length=8, padded=True)
    real = inputs["attention_mask"].bool()
    with observe(model, keys=8) as watcher:
        model(**inputs)
    for layer in watcher.observation().layers:
        # All weight of a real query is on real keys.
        assert {(moments.count, round(moments.mean, 5)) for moments in layer.heads["mass"]} == {(int(real.sum()), 1.0)}


@pytest.mark.parametrize("model_type", ["bloom", "gptj", "mpt", "xglm"])
@torch.no_grad()
def test_padding_and_caches_of_models_with_separate_operators(model_type):
    model = model_types.build(model_type)
    inputs = model_types.inputs_of(model, length=8, padded=True)
    tokens, mask = inputs["input_ids"], inputs["attention_mask"]
    with observe(model) as watcher:
        model(**inputs)
    whole = watcher.observation()
    assert {moments.count for moments in whole.layers[0].heads["mass"]} == {5 + 7}
    with observe(model) as watcher:
        cache = model(input_ids=tokens[:, :6], attention_mask=mask[:, :6], use_cache=True).past_key_values
        for stop in (7, 8):
            model(input_ids=tokens[:, stop - 1 : stop], attention_mask=mask[:, :stop], past_key_values=cache)
    for mine, theirs in zip(watcher.observation().layers, whole.layers, strict=True):
        assert mine.positions == theirs.positions
        for statistic in ("mass", "entropy", "impact"):
            found, expected = (torch.tensor(layer.by_position[statistic]) for layer in (mine, theirs))
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
