"""One `Run` to one `Record`: what is trained, how, and what is kept of it.

Import from the modules: `run` describes a training, `train` does it, `engine` computes its steps, `executors` do many,
`records` keep what came of them. This file imports none of them, so that events and records are read without loading
PyTorch.
"""

__all__: list[str] = []
