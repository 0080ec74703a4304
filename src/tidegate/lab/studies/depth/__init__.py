"""The study depth."""
