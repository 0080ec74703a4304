"""One `Run` to one `Record`: what is trained, how, and what is kept of it."""

__all__: list[str] = []
