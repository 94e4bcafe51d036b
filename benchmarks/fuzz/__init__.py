"""Damaged schedule and plan files: read right, or refused with a typed error, in time."""
