"""The study trained_layers."""
