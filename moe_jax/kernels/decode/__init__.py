"""Kernels between the matmuls of an engine's step on Hopper; with few tokens each kernel's start counts."""
