"""The study depth."""

__all__: list[str] = []
