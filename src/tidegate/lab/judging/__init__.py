"""Figures of runs to verdicts: plain numbers in, verdicts with their sentences out."""

__all__: list[str] = []
