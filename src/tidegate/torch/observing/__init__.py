"""What watches the attention of any PyTorch model while it runs."""

__all__: list[str] = []
