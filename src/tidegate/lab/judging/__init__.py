"""Figures of runs to verdicts: plain numbers in, verdicts with their sentences out.

Reads in one direction: `distributions`; `judge`, `placebos` and `figures`, which decide by them; `power`, which says
before the runs what they can decide, and `calibration`, which draws comparisons from real runs; `words`, which writes
sentences.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tidegate.lab.judging.calibration import Calibration, calibrate
from tidegate.lab.judging.distributions import dunnett_critical_value, dunnett_p_value, mean_and_sd, t_interval
from tidegate.lab.judging.figures import Figure, FigureResult, FigureResults, judge_figures
from tidegate.lab.judging.judge import MARGIN, Comparison, VariantResult, false_positive_rate, judge_variants
from tidegate.lab.judging.placebos import PlaceboResult, effect_of, judge_placebo, side_of_zero
from tidegate.lab.judging.power import detectable_difference, seeds_needed
from tidegate.lab.judging.words import RULE, add_sentences, effect_sentence, rule_text

__all__ = [
    "MARGIN",
    "RULE",
    "Calibration",
    "Comparison",
    "Figure",
    "FigureResult",
    "FigureResults",
    "PlaceboResult",
    "VariantResult",
    "add_sentences",
    "calibrate",
    "compare_to_control",
    "detectable_difference",
    "dunnett_critical_value",
    "dunnett_p_value",
    "effect_of",
    "effect_sentence",
    "false_positive_rate",
    "judge_figures",
    "judge_placebo",
    "judge_variants",
    "mean_and_sd",
    "rule_text",
    "seeds_needed",
    "side_of_zero",
    "t_interval",
]


def compare_to_control(
    losses: Mapping[str, Sequence[float | None]],
    *,
    control: str,
    margin: float = MARGIN,
    confidence: float = 0.95,
    identical: Collection[str] = (),
    lower_is_better: bool = True,
    unit: str = "",
) -> Comparison:
    """Judge every variant against the control, and say it in sentences; `rule_text` says by which rule.

    losses    : for each variant one figure for each seed, in one order of seeds; None where the run diverged
    margin    : half-width of the band of no importance, as a share of the control's mean
    identical : variants known to be the control under another name. One whose figures are the control's in every run,
                while they vary from run to run, is found without being named
    unit      : of the figures, for the sentences

    A variant that is identical or has a diverged run is left out of the table before the model is fitted. No variant
    is judged if the control has a diverged run, if there are fewer than three seeds, or if the residual is zero.
    """
    comparison = judge_variants(
        losses,
        control=control,
        margin=margin,
        confidence=confidence,
        identical=identical,
        lower_is_better=lower_is_better,
        unit=unit,
    )
    return add_sentences(comparison)
