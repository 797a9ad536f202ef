"""Kernels between the matmuls of an engine's step on Hopper. With few tokens, launches dominate, so kernels are few."""
