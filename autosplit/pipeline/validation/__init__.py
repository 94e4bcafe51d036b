"""Whether a schedule is legal, its faults on a grid, and schedules as CSV files of torch."""
