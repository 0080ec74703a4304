"""Training data. Import the modules by name; the package itself imports nothing."""

__all__: list[str] = []
