"""Do gates learn when they are added to a trained model, and which remedy makes them move?"""

from tidegate.lab.studies.gate_tuning.run import GateTuningOptions, GateTuningResult, finding, run_gate_tuning
from tidegate.lab.studies.gate_tuning.views import view
from tidegate.lab.studies.study import Study as _Study

__all__ = ["STUDY", "GateTuningOptions", "GateTuningResult", "finding", "run_gate_tuning", "view"]

STUDY = _Study(
    name="gate-tuning",
    question="Do gates learn when they are added to a trained model, and which remedy makes them move?",
    options=GateTuningOptions(),
    result=GateTuningResult,
    run=run_gate_tuning,
    finding=finding,
    view=view,
)
