"""Figures of runs to verdicts: plain numbers in, verdicts with their sentences out."""
