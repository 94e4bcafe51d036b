"""What ``torch.distributed.fsdp.fully_shard`` made of a module."""
