"""Memory of each rank during a step, by owner: measured, and predicted before it runs."""
