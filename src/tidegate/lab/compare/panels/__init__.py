"""Parts of a comparison's page, a file for each. Import its modules by name; the package itself imports nothing."""

__all__: list[str] = []
