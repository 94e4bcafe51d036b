"""Timelines, traces and tables of schedules and plans, for people to look at."""
