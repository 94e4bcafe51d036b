"""Text files in and out: bounded, and with typed errors."""
