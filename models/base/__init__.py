"""The frozen target model: loading, forward passes, tree verification, adapters and LoRA."""
