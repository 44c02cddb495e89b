"""Source connectors: Arrow batches and checkpoints for programs that store their own position."""
