"""Turn one `Run` into one `Record`.

Import from the modules: `run` describes a training, `train` executes it, `executors` execute many, `records` store the
results. This file imports none of them, so that events are read without loading PyTorch.
"""

__all__: list[str] = []
