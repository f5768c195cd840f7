"""Faster implementations of the same arithmetic: grouped attention, packed and fused linears, CUDA graphs."""
