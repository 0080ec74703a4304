"""Do gates learn when they are added to a trained model, and which remedy makes them move?"""

from tidegate.lab.studies.catalogue import QUESTIONS as _QUESTIONS
from tidegate.lab.studies.gate_tuning.run import GateTuningOptions, GateTuningResult, finding, run_gate_tuning
from tidegate.lab.studies.gate_tuning.views import view
from tidegate.lab.studies.study import Study as _Study

__all__ = ["STUDY", "GateTuningOptions", "GateTuningResult", "finding", "run_gate_tuning", "view"]

STUDY = _Study(
    name="gate-tuning",
    question=_QUESTIONS["gate-tuning"],
    claim="No paper's: what gates do that are added to a trained model is our own question. The attention to the "
    "start is looked at because the bilinear-modulation note, arXiv 2505.06708 and arXiv 2602.01468 say that "
    "gates lower it.",
    options=GateTuningOptions(),
    result=GateTuningResult,
    run=run_gate_tuning,
    finding=finding,
    view=view,
)
