"""The model and optimizer state of one rank in training."""
