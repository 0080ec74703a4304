"""The command line: `tidegate VERB`."""

from tidegate.cli.app import app

__all__ = ["app"]
