"""How do the attention layers of a language model bend, before and after training?"""

from tidegate.lab.studies.study import Study as _Study
from tidegate.lab.studies.trained_layers.run import (
    TrainedLayersOptions,
    TrainedLayersResult,
    finding,
    run_trained_layers,
)
from tidegate.lab.studies.trained_layers.views import view

__all__ = ["STUDY", "TrainedLayersOptions", "TrainedLayersResult", "finding", "run_trained_layers", "view"]

STUDY = _Study(
    name="trained-layers",
    question="How do the attention layers of a language model bend, before and after training?",
    options=TrainedLayersOptions(),
    result=TrainedLayersResult,
    run=run_trained_layers,
    finding=finding,
    view=view,
)
