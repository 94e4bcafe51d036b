"""Plans against cuts by hand, against what was then measured, and at a size that fits no laptop."""
