"""Tests over meshes of up to 8 devices; `tests/parallel/test_eight_devices.py` runs them where there are as many."""

import jax

collect_ignore_glob = [] if jax.device_count() >= 8 else ["test_*.py"]
