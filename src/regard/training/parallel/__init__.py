"""Several ranks: launch, collectives, DDP and FSDP wrappers."""
