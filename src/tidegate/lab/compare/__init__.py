"""A request to runs, verdicts and a page."""

__all__: list[str] = []
