"""Which implementation of the grouped matmuls runs, and how a user picks one."""

import functools
import logging
import os

BACKENDS = ("xla",)
"""Every backend; `xla` runs on every platform and is the default of each."""

ENVIRONMENT_VARIABLE = "MOE_JAX_BACKEND"

_logger = logging.getLogger(__name__)


def resolve_backend(name: str | None = None) -> str:
    """The backend to use: `name` if given, else the environment variable MOE_JAX_BACKEND, else the default.

    Raises:
        ValueError: the name is none of BACKENDS.
    """
    source = "argument backend"
    if name is None and ENVIRONMENT_VARIABLE in os.environ:
        name, source = os.environ[ENVIRONMENT_VARIABLE], f"environment variable {ENVIRONMENT_VARIABLE}"
    if name is None:
        name = "xla"
    if name not in BACKENDS:
        raise ValueError(f"{source}: unknown backend {name!r}; choose one of {', '.join(map(repr, BACKENDS))}")
    _announce(name)
    return name


@functools.cache
def _announce(name: str) -> None:
    """Logs each backend taken once a process."""
    _logger.info("MoE experts run on backend %r", name)
