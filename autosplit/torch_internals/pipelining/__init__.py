"""torch.distributed.pipelining as its runtime drives stages: all private names of it."""
