"""torch.distributed.pipelining's schedules with its own stages, with ours, and our engine."""
