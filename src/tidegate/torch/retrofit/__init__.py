"""Add gates to loaded Hugging Face models, and train, save, merge, export or remove them."""

from tidegate.torch.gate_groups import freeze_all_but_gates, gate_optimizer_groups
from tidegate.torch.retrofit.export import export_gated, to_laguna, to_qwen3_next, to_qwen3_next_attention, to_step3p7
from tidegate.torch.retrofit.files import load_gates, save_gates
from tidegate.torch.retrofit.folder import load_pretrained, save_pretrained
from tidegate.torch.retrofit.install import RetrofitReport, add_gates, remove_gates
from tidegate.torch.retrofit.merge import merge_gates

__all__ = [
    "RetrofitReport",
    "add_gates",
    "export_gated",
    "freeze_all_but_gates",
    "gate_optimizer_groups",
    "load_gates",
    "load_pretrained",
    "merge_gates",
    "remove_gates",
    "save_gates",
    "save_pretrained",
    "to_laguna",
    "to_qwen3_next",
    "to_qwen3_next_attention",
    "to_step3p7",
]
