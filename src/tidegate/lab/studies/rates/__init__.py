"""The study rates."""

__all__: list[str] = []
