"""Tests over meshes of up to 8 devices, which a process has if all its files are in this folder (tests/conftest.py)."""

import jax

collect_ignore_glob = [] if jax.device_count() >= 8 else ["test_*.py"]
