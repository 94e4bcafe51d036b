"""Where to cut a model for one schedule."""
