"""What happens to damaged checkpoints, and what looking for damage costs."""
