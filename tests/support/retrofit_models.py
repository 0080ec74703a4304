"""Small random models of many families from transformers, with helpers of the retrofit tests."""

import torch
import transformers
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer

from tidegate.torch.gate import gate_parameters

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
TOKENS = {**SIZES, "vocab_size": 64, "intermediate_size": 48}
# The default ids would lie outside the small vocabulary.
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GROUPED = {**TOKENS, **SPECIAL, "num_key_value_heads": 2}

FAMILIES = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 4}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 16}),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 64, **SPECIAL},
    ),
    "phi": ("PhiForCausalLM", "PhiConfig", {**TOKENS, **SPECIAL}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**GROUPED, "num_key_value_heads": 1, "head_dim": 8}),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {**SIZES, **SPECIAL, "vocab_size": 64, "ffn_dim": 48, "word_embed_proj_dim": 32},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", TOKENS),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
        | {"image_size": 16, "patch_size": 4},
    ),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**TOKENS, **SPECIAL}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**GROUPED}),
}
CAUSAL = tuple(name for name in FAMILIES if name not in ("bert", "vit"))


def tiny(family, *, dtype=torch.float32, implementation="sdpa", seed=0, **options):
    """Build a small random model of a family, in evaluation mode."""
    model_class, config_class, sizes = FAMILIES[family]
    config = getattr(transformers, config_class)(**{**sizes, **options})
    torch.manual_seed(seed)
    model = getattr(transformers, model_class)(config).to(dtype).eval()
    model.set_attn_implementation(implementation)
    return model


def inputs_of(model, *, length=7, seed=3):
    """Return tokens with left padding in the first row and right padding in the second, or images."""
    generator = torch.Generator().manual_seed(seed)
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator).to(model.dtype)}
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, :2], mask[1, -3:] = 0, 0
    return {"input_ids": torch.randint(3, 64, (2, length), generator=generator), "attention_mask": mask}


def logits(model, inputs=None):
    with torch.no_grad():
        return model(**(inputs_of(model) if inputs is None else inputs)).logits


def stir(model, *, seed=4, std=0.3):
    """Set the parameters of all gates to random values, in place of training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in gate_parameters(model):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return model


def adapt(model, names=("q_proj", "v_proj")):
    """Put low-rank adapters of peft, with random weights, around the projections of a model, in place."""
    torch.manual_seed(0)
    options = LoraConfig(r=2, target_modules=list(names), init_lora_weights=False)
    return inject_adapter_in_model(options, model).eval()


def merge_adapters(model):
    """Fold the adapters into the projections inside them, and remove them."""
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if isinstance(child, LoraLayer):
                child.merge()
                setattr(owner, name, child.get_base_layer())
    return model
