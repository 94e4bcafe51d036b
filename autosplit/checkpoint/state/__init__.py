"""What a checkpoint has besides the model: optimizer, scheduler, generators, step."""
