"""The study flat_or_curved."""

__all__: list[str] = []
