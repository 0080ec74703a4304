"""The study boundary."""
