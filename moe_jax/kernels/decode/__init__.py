"""Kernels between the matmuls of a decoding step on Hopper, where few tokens make each kernel's start count."""
