"""How do the attention layers of a language model bend, before and after training?"""

from tidegate.lab.studies.catalogue import QUESTIONS as _QUESTIONS
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
    question=_QUESTIONS["trained-layers"],
    claim="arXiv 2604.14702 is on the curvature of attention with and without gates. Whether it is seen in trained "
    "language models is our own question; no claim of the paper is tested.",
    options=TrainedLayersOptions(),
    result=TrainedLayersResult,
    run=run_trained_layers,
    finding=finding,
    view=view,
)
