"""What blocks and stages cost: time, memory and messages, measured or estimated."""
