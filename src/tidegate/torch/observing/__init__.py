"""Observe the attention of any PyTorch model while it runs: `observe`, `Observer`, and the data that they return."""

from tidegate.torch.observing.observation import (
    CLOSED_BELOW,
    HISTOGRAM_EDGES,
    GateSummary,
    LayerObservation,
    Moments,
    Observation,
    ResidualSummary,
    statistic_names,
)
from tidegate.torch.observing.observer import Observer
from tidegate.torch.observing.statistics import AttentionStatistics, attention_statistics
from tidegate.torch.observing.watcher import Watcher, observe

__all__ = [
    "CLOSED_BELOW",
    "HISTOGRAM_EDGES",
    "AttentionStatistics",
    "GateSummary",
    "LayerObservation",
    "Moments",
    "Observation",
    "Observer",
    "ResidualSummary",
    "Watcher",
    "attention_statistics",
    "observe",
    "statistic_names",
]
