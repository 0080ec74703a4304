"""The study flat_or_curved."""
