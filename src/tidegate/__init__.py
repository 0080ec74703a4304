"""Tidegate: a library and laboratory for gated attention."""
