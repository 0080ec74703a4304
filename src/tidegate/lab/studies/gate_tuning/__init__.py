"""The study gate_tuning."""

__all__: list[str] = []
