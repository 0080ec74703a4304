"""What attention does in a trained model, and its page."""

__all__: list[str] = []
