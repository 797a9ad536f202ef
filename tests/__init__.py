"""Tests of moe_jax, and the helpers that they import from `tests.helpers`."""
