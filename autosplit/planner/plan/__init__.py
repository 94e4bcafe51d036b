"""Plans: found, checked, written and read."""
