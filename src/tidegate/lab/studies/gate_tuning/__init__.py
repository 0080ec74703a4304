"""The study gate_tuning."""
