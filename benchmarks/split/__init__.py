"""What splitting costs: time, operations, memory and compilation, on four families of models."""
