"""Load language models, ours and Hugging Face's, and measure their tokens, curvature and gauge."""

from __future__ import annotations

from tidegate.lab.models.curvature import model_curvature
from tidegate.lab.models.curvature_panels import curvature_page, curvature_panels
from tidegate.lab.models.language_models import LanguageModel, load_language_model, make_language_model, token_windows
from tidegate.lab.models.measure import measure_layers, measure_run

__all__ = [
    "LanguageModel",
    "curvature_page",
    "curvature_panels",
    "load_language_model",
    "make_language_model",
    "measure_layers",
    "measure_run",
    "model_curvature",
    "token_windows",
]
