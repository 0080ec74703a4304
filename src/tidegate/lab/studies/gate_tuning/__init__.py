"""Do gates learn when they are added to a trained model, and which remedy makes them move?"""

from tidegate.lab.studies.gate_tuning.run import (
    STUDY,
    GateTuningOptions,
    GateTuningResult,
    finding,
    run_gate_tuning,
    view,
)

__all__ = ["STUDY", "GateTuningOptions", "GateTuningResult", "finding", "run_gate_tuning", "view"]
