"""Passes that keep ranks below a bound of memory: schedules in, schedules out."""
