"""Faster implementations of models' operations: grouped attention, packed and fused linear layers, CUDA graphs."""
