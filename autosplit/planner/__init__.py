"""From a whole model to balanced stages."""
