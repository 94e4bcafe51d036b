"""Modules whose parameters ``torch.distributed.fsdp.fully_shard`` has sharded."""
