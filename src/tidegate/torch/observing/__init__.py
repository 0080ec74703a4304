"""What watches the attention of any PyTorch model while it runs."""
