"""Attention as tensor calculus, on NumPy, JAX and PyTorch arrays alike."""
