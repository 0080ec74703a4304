"""Statistical tests of runs: plain numbers in, verdicts with their sentences out.

Modules import in one direction: `distributions`; `power`; `words`; `judge`; `placebos`, `metrics` and `calibration`.
"""

from tidegate.lab.judging.calibration import Calibration, calibrate, false_positive_rate
from tidegate.lab.judging.distributions import dunnett_critical_value, dunnett_p_value, mean_and_sd, t_interval
from tidegate.lab.judging.judge import MARGIN, Comparison, VariantResult, compare_to_control
from tidegate.lab.judging.metrics import MetricResult, MetricResults, RunMetric, judge_metrics
from tidegate.lab.judging.placebos import PlaceboResult, effect_of, judge_placebo, side_of_zero
from tidegate.lab.judging.power import detectable_difference, seeds_needed
from tidegate.lab.judging.words import RULE, effect_sentence, rule_text

__all__ = [
    "MARGIN",
    "RULE",
    "Calibration",
    "Comparison",
    "MetricResult",
    "MetricResults",
    "PlaceboResult",
    "RunMetric",
    "VariantResult",
    "calibrate",
    "compare_to_control",
    "detectable_difference",
    "dunnett_critical_value",
    "dunnett_p_value",
    "effect_of",
    "effect_sentence",
    "false_positive_rate",
    "judge_metrics",
    "judge_placebo",
    "mean_and_sd",
    "rule_text",
    "seeds_needed",
    "side_of_zero",
    "t_interval",
]
