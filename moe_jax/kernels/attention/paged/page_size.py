"""The size of a page, without JAX: the schedule of an engine plans pages that kernels read."""

PAGE_SIZE = 64
"""Tokens of a page."""
