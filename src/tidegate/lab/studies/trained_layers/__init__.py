"""The study trained_layers."""

__all__: list[str] = []
