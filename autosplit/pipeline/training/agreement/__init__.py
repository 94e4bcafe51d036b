"""What all ranks of a trainer must have alike: batches and options."""
