"""Decompose attention into a hierarchical mixture of experts, and test which experts can be identified."""

from tidegate.experts.canonical import HeadMatch, canonicalize, match_heads
from tidegate.experts.channel_gauge import ChannelGauge, channel_gauge, model_gauge
from tidegate.experts.decomposition import Decomposition, decompose, with_input_gates
from tidegate.experts.estimate import METRICS, ExpertExperiment, RateData, run_experiment
from tidegate.experts.fitting import CellData, Fits, fit_batch
from tidegate.experts.gauge import GaugeReport, GaugeRow, gauge_report, gauge_table, random_layer
from tidegate.experts.gauge_theory import GaugePrediction, predict_gauge
from tidegate.experts.models import PLACEMENTS, Design, ExpertModel, ExpertTruth, default_design, default_truth
from tidegate.experts.modulus import Modulus, profile_modulus
from tidegate.experts.rates import Rate, estimate_rate
from tidegate.experts.transform import change_basis, random_gauge
from tidegate.experts.voronoi import Atoms, LossParts, voronoi_loss

__all__ = [
    "METRICS",
    "PLACEMENTS",
    "Atoms",
    "CellData",
    "ChannelGauge",
    "Decomposition",
    "Design",
    "ExpertExperiment",
    "ExpertModel",
    "ExpertTruth",
    "Fits",
    "GaugePrediction",
    "GaugeReport",
    "GaugeRow",
    "HeadMatch",
    "LossParts",
    "Modulus",
    "Rate",
    "RateData",
    "canonicalize",
    "change_basis",
    "channel_gauge",
    "decompose",
    "default_design",
    "default_truth",
    "estimate_rate",
    "fit_batch",
    "gauge_report",
    "gauge_table",
    "match_heads",
    "model_gauge",
    "predict_gauge",
    "profile_modulus",
    "random_gauge",
    "random_layer",
    "run_experiment",
    "voronoi_loss",
    "with_input_gates",
]
