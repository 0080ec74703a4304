"""Language models of ours and of others, loaded to be looked at; their curvature and gauge."""

__all__: list[str] = []
