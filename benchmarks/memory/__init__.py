"""What ranks hold: measured, predicted, moved, and what that costs."""
