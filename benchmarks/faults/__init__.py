"""Faults of one rank: whether every rank ends, says why, and leaves nothing behind."""
