"""What several commands take."""

from typing import Literal

Dtype = Literal["bfloat16", "float16", "float32"]


def device_count(devices: int | None) -> int:
    """How many of the devices that there are take part.

    Raises:
      ValueError: so many cannot.
    """
    import jax

    if devices is not None and devices < 1:
        raise ValueError(f"--devices must be at least 1; got {devices}")
    there = jax.device_count()
    count = devices if devices is not None else there if jax.process_count() > 1 else 1
    if count > there or (jax.process_count() > 1 and count != there):
        some = "all" if jax.process_count() > 1 else "1 to"
        raise ValueError(f"--devices must be {some} {there}, the devices that there are; got {devices}")
    return count
