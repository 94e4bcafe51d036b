"""Schedules for given times, under a cap of memory."""
