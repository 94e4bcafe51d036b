"""Models on the meta device, and the values that their stages get."""
