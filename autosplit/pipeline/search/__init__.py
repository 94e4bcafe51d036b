"""Search for schedules: the shortest step for measured times, under a memory limit."""
