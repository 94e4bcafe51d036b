"""What became of other ranks: who failed first, who died, left or is stuck."""
