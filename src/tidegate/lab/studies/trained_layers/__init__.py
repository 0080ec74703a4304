"""How curved are the attention layers of a language model, before and after training?"""

from tidegate.lab.studies.trained_layers.run import (
    STUDY,
    TrainedLayersOptions,
    TrainedLayersResult,
    finding,
    run_trained_layers,
    view,
)

__all__ = ["STUDY", "TrainedLayersOptions", "TrainedLayersResult", "finding", "run_trained_layers", "view"]
