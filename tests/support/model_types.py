"""A tiny random model of every causal model type of transformers.

`SIZES` has a small value for each size in configurations; a type gets those that its configuration has. `OWN` has
further options of types that need them. `NOT_BUILT` has the reasons why types are not built here.
"""

import copy
import dataclasses
import warnings

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

SIZES = {
    0: "pad_token_id",
    1: "bos_token_id n_group topk_group n_shared_experts num_shared_experts moe_num_shared_experts",
    2: (
        "eos_token_id num_hidden_layers num_key_value_heads n_layer n_layers num_layers encoder_layers "
        "decoder_layers num_experts_per_tok moe_k moe_topk zero_expert_num index_n_heads n_groups "
        "linear_num_key_heads num_blocks"
    ),
    4: (
        "num_attention_heads n_head rotary_dim n_heads num_heads encoder_attention_heads "
        "decoder_attention_heads sliding_window sliding_window_size window_size attention_window_size "
        "num_experts n_routed_experts num_local_experts moe_num_experts qk_nope_head_dim index_topk "
        "gated_norm_rank mamba_chunk_size chunk_size linear_num_value_heads linear_num_heads block_size "
        "prompt_length patch_size"
    ),
    8: (
        "head_dim qk_rope_head_dim v_head_dim mamba_d_state mamba_n_heads mamba_num_heads mamba_head_dim "
        "ssm_state_size state_size linear_key_head_dim linear_value_head_dim linear_head_dim "
        "hidden_size_per_layer_input num_mel_bins"
    ),
    16: (
        "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size "
        "moe_shared_expert_intermediate_size shared_intermediate_size router_hidden_size q_lora_rank "
        "kv_lora_rank o_lora_rank index_head_dim block_multiple_of pronunciation_embed_dim shape_embed_dim "
        "position_bias_max_distance image_size output_channels position_embedding_size crop_size"
    ),
    32: (
        "hidden_size n_embd d_model embedding_size word_embed_proj_dim input_embedding_size "
        "output_embedding_size backbone_hidden_size ext_pw_out_channel depthwise_separable_out_channel "
        "nemo_conv_channels hidden_size_global"
    ),
    48: (
        "intermediate_size ffn_dim d_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size "
        "intermediate_size_mlp dense_intermediate_size"
    ),
    64: (
        "vocab_size max_position_embeddings n_positions mamba_d_ssm vocab_size_per_layer_input "
        "max_source_positions max_target_positions pronunciation_vocab_size shape_vocab_size"
    ),
}
"""The names of options by their value. Windows are shorter than a test's input; two of four experts are active."""

GENERIC = {name: size for size, names in SIZES.items() for name in names.split()}

HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"]}
CHUNKED = {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 4, "no_rope_layers": [1, 0]}
DECODER = {"is_decoder": True}
LATENT = {"num_key_value_heads": 4}
"""Latent attention has as many key as query heads."""
INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8}

BERT_LIKE = ("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert")
BERT_LIKE += (
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roc_bert",
    "roformer",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)
"""Types that attend in both directions, without a cache, unless they are configured as decoders."""

OWN = {
    **dict.fromkeys(BERT_LIKE, DECODER),
    **dict.fromkeys(("granitemoehybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"), HYBRID),
    **dict.fromkeys(("qwen3_5_text", "qwen3_next"), HYBRID),
    **dict.fromkeys(("bailing_hybrid", "kimi_linear"), HYBRID | LATENT),
    **dict.fromkeys(("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "gemma3_text"), WINDOWED),
    **dict.fromkeys(("kolibri1", "laguna", "mellum", "ministral", "olmo3"), WINDOWED),
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash"), LATENT),
    **dict.fromkeys(("minicpm3", "youtu"), LATENT),
    # With a smaller choice of keys, these give different outputs with a cache.
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), LATENT | {"index_topk": 64}),
    "bamba": {"attn_layer_indices": [1], "mamba_chunk_size": 64},
    "blt": {"encoder_hash_byte_group_vocab": 64, "use_cache": False},
    "cohere_compass_text": WINDOWED
    | {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}, "full_attention": None}},
    "cpmant": {"dim_head": 8, "dim_ff": 48, "position_bias_num_buckets": 8, "prompt_types": 4, "segment_types": 4},
    "ctrl": {"dff": 48},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48},
    },
    "deepseek_v4": {"layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"]}
    | {
        "num_key_value_heads": 1,
        "compress_rates": {"heavily_compressed_attention": 4, "compressed_sparse_attention": 2},
    },
    "gemma3n_text": WINDOWED | {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "inkling_text": {"layer_types": ["hybrid_sliding", "hybrid"], "swa_num_attention_heads": 4, "rel_extent": 8}
    | {"swa_num_key_value_heads": 2, "swa_head_dim": 8, "d_rel": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    **dict.fromkeys(("llama4", "llama4_text"), CHUNKED),
    "mamba2": {"num_heads": 8},
    "moshi": {"sliding_window": 64},
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), HYBRID | INDEXER | {"indexer_compress_ratio": 2}),
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {"is_decoder": True, "axial_pos_shape": (8, 8), "axial_pos_embds_dim": (16, 16), "num_buckets": 2}
    | {"attn_layers": ["local", "lsh"], "lsh_attn_chunk_length": 4, "local_attn_chunk_length": 4, "hash_seed": 0}
    | {"attention_head_size": 8, "feed_forward_size": 48},
    "xlstm": {"chunk_size": 16, "hidden_size": 64, "qk_dim_factor": 1.0, "ffn_round_up_to_multiple_of": 16},
    "xlm": {"causal": True},
    "xmod": DECODER | {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3, "head_dim": 16},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}

NOT_BUILT = {
    "gemma3n": "its images need the package timm",
    "gemma4_assistant": "it reads the keys and values of another model",
    "gemma4_unified_assistant": "it reads the keys and values of another model",
}

BOTH_WAYS = ("cpmant", "xlnet")
"""Types in which tokens always see later ones: those of a prompt, or all."""

NO_ATTENTION = ("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm")
"""Types without softmax attention, only recurrences."""


def model_types():
    """Return the causal model types of the installed transformers."""
    return tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def model_class(model_type):
    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def fitting(kind, options):
    """Return the options that a class of configurations has, also under another name."""
    known = {field.name for field in dataclasses.fields(kind)} | set(kind.attribute_map)
    return {name: value for name, value in options.items() if name in known}


def generic_options(kind):
    """Return the generic options of a class of configurations, and of the required configurations inside it."""
    inner = {name: _inner_options(spec) for name, spec in getattr(kind, "sub_configs_defaults", {}).items()}
    return fitting(kind, GENERIC) | {name: options for name, options in inner.items() if options is not None}


def _inner_options(spec):
    if not hasattr(spec, "config_class"):
        return generic_options(spec)
    if spec.optional:
        return None
    kind = CONFIG_MAPPING[spec.model_type] if spec.model_type else spec.config_class
    return {"model_type": kind.model_type, **generic_options(kind)}


def config_of(model_type, **options):
    kind = model_class(model_type).config_class
    return kind(**copy.deepcopy({**generic_options(kind), **OWN.get(model_type, {}), **options}))


def build(model_type, *, seed=0, **options):
    """Build a tiny random model of a type, in evaluation mode."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model_class(model_type)(config_of(model_type, **options)).eval()


def inputs_of(model, *, rows=2, length=7, padded=False, seed=1):
    """Return random tokens for a tiny model, optionally with left padding in the first row.

    A model with several codebooks takes a row for each.
    """
    generator = torch.Generator().manual_seed(seed)
    codebooks = model.config.num_codebooks if model.config.model_type.startswith("musicgen") else 1
    tokens = torch.randint(3, GENERIC["vocab_size"], (rows * codebooks, length), generator=generator)
    mask = torch.ones(rows, length, dtype=torch.long)
    if padded:
        mask[0, :2] = 0
    return {"input_ids": tokens, "attention_mask": mask}
