"""What each rank holds during a step, by owner: measured, and predicted before it runs."""
