"""The training loop: steps, optimiser, batches, checkpoints."""
