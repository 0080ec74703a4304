"""A request to runs, verdicts and a page."""
