"""Distributed training: launch, collectives, DDP and FSDP."""
