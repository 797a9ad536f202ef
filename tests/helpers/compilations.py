"""A list of the programs that JAX compiles meanwhile."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def counted() -> Iterator[list[float]]:
    """Yields a list, to which each compilation adds its seconds until the block ends."""
    compiled = []

    def listen(event, seconds, **_):
        if "backend_compile" in event:
            compiled.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax._src.monitoring.unregister_event_duration_listener(listen)
