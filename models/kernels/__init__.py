"""The same arithmetic, faster: grouped attention, packed and fused linears, CUDA graphs."""
