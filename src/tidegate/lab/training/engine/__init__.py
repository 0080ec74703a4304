"""How the steps of one run are computed, at any size: in which precision, by which optimiser, in how many processes.

Import its modules by name; the package itself imports nothing.

- `loss` makes the loss of a batch: precision, compilation, parts.
- `optimizers` updates the parameters.
- `launch` starts processes, `parallel` joins them to train one model, `distributed_checkpoint` saves what they have.
"""

__all__: list[str] = []
