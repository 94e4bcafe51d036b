"""What splitting costs: time, operations and memory, on four families of models."""
