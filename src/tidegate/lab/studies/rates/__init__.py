"""The study rates."""
