"""Leaves out tests that need eight devices if there are fewer. `tests/parallel/test_eight_devices.py` runs them."""

import jax

collect_ignore_glob = [] if jax.device_count() >= 8 else ["test_*.py"]
