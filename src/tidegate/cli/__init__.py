"""The command line: `tidegate VERB`."""

from tidegate.cli.app import app, main

__all__ = ["app", "main"]
