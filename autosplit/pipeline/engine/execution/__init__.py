"""One rank's actions, run on its stages in the order of a schedule."""
