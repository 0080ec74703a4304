"""Tiny encoders, encoder-decoders, and models of images and sound, where generic sizes suffice to build one.

docs/models-supported.md counts them beside the causal types.
"""

import warnings

import torch
import transformers
from model_types import fitting, generic_options
from retrofit_models import stir
from transformers.models.auto import modeling_auto

from tidegate.torch import gate_parameters
from tidegate.torch.retrofit import add_gates
from tidegate.torch.retrofit.probe import bitwise_equal, probe_inputs, run_probe

KINDS = {
    "encoder and decoder": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "masked text": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "images": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "sound": modeling_auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
    "speech to text": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
}
SIZES = {
    "num_layers": 2,
    "num_decoder_layers": 2,
    "d_kv": 8,
    "d_ff": 48,
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 48,
    "num_feat_extract_layers": 2,
    "conv_dim": (8, 8),
    "conv_kernel": (4, 4),
    "conv_stride": (2, 2),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "input_feat_per_channel": 8,
    "decoder_start_token_id": 1,
}
LARGEST = 3_000_000
"""Largest number of weights of a small model."""


def build(kind, model_type):
    """A tiny random model in evaluation mode; None if generic sizes do not give one."""
    names = KINDS[kind][model_type]
    model_class = getattr(transformers, names if isinstance(names, str) else names[0])
    config_class = model_class.config_class
    try:
        config = config_class(**generic_options(config_class) | fitting(config_class, SIZES))
        with torch.device("meta"):
            if sum(weight.numel() for weight in model_class(config).parameters()) > LARGEST:
                return None
        torch.manual_seed(0)
        return model_class(config).eval()
    except Exception:
        # A type may need options that generic sizes do not have.
        return None


def check_gates(kind, model_type, gate):
    """Add gates to a tiny model and check that they keep its outputs bitwise and train.

    Return None if there is no model, and False if the gates are rejected.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build(kind, model_type)
        if model is None:
            return None
        try:
            report = add_gates(model, gate)
        except ValueError:
            return False
        assert report.bitwise_equal
        inputs = probe_inputs(model)
        before = run_probe(model, inputs)
        stir(model)
        assert not bitwise_equal(run_probe(model, inputs), before), "gates have no effect"
        output = (each for each in model(**inputs).to_tuple() if isinstance(each, torch.Tensor) and each.requires_grad)
        sum(each.float().square().sum() for each in output).backward()
        assert all(weight.grad is not None and weight.grad.any() for weight in gate_parameters(model)), "no gradient"
        return True
