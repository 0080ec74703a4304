"""How a model is watched while it runs: which calls are seen, whose they are, and what is summed up of them."""

__all__: list[str] = []
