"""Studies: one file, one question. Import its modules by name; the package itself imports nothing."""

__all__: list[str] = []
