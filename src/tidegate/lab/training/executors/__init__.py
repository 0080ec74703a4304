"""Ways to execute many runs. Import its modules by name; the package itself imports nothing."""

__all__: list[str] = []
