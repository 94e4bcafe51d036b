"""Text in and out: files, bounded and with typed errors, and figures as people write them."""
