"""What a step would take, without running it: when results are made, arrive, and are kept."""
