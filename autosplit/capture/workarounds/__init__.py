"""What torch traces as something else than it runs, one defect a file."""
