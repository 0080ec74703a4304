"""The study boundary."""

__all__: list[str] = []
