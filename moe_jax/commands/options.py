"""Options that several commands share."""

from typing import Literal

Dtype = Literal["bfloat16", "float16", "float32"]


def device_count(devices: int | None) -> int:
    """Returns the number of devices to use. Default: 1; in a job of several processes, all devices.

    Raises:
      ValueError: `devices` is below 1 or above the number of visible devices, or a job of several processes would not use all.
    """
    import jax

    if devices is not None and devices < 1:
        raise ValueError(f"--devices must be at least 1; got {devices}")
    visible = jax.device_count()
    count = devices if devices is not None else visible if jax.process_count() > 1 else 1
    if count > visible or (jax.process_count() > 1 and count != visible):
        some = "all" if jax.process_count() > 1 else "1 to"
        raise ValueError(f"--devices must be {some} {visible}, the visible devices; got {devices}")
    return count
