"""Which experts should share a device, so that the devices have as much to compute as each other."""

import numpy as np
from jaxtyping import Float, Int


def balanced_order(expert_load: Float[np.ndarray, "experts"], devices: int, num_groups: int = 1) -> Int[np.ndarray, "experts"]:
    """The expert for each place, where device d of n holds places d*E/n to (d+1)*E/n.

    The experts, the most loaded first, each go to the device with the least load that has room: Graham's rule of the longest
    processing time with E/n places a device, as in DeepSeek's EPLB (https://github.com/deepseek-ai/EPLB) without copies.

    Where the router chooses among `num_groups` runs of neighbours, these stay together: whole groups are dealt out to the
    devices, or, where a group fills several devices, its experts among these.

    Where that makes the busiest device no less busy, every expert stays where it is.

    Raises:
      ValueError: devices that the experts, or their groups, cannot be dealt out to; loads that are not one number of at least
        0 for each expert.
    """
    load = np.asarray(expert_load)
    if load.ndim != 1:
        raise ValueError(f"expert_load must be [experts]; got {list(load.shape)}")
    meant = np.isfinite(load) & (load >= 0)
    if not meant.all():
        raise ValueError(f"expert_load must be numbers of at least 0; got {load[~meant][0]} for one expert")
    if devices < 1 or len(load) % devices:
        raise ValueError(f"{len(load)} experts cannot be dealt out to {devices} devices; take a divisor")
    if num_groups < 1 or len(load) % num_groups:
        raise ValueError(f"{len(load)} experts are not {num_groups} groups of one size")
    if num_groups % devices and devices % num_groups:
        raise ValueError(
            f"{num_groups} groups of experts cannot be dealt out to {devices} devices; take a divisor or a multiple"
        )
    as_it_is = np.arange(len(load), dtype=np.int32)
    groups = as_it_is.reshape(num_groups, -1)
    if devices <= num_groups:
        order = groups[_deal(load[groups].sum(axis=1), devices)].reshape(-1)
    else:
        order = np.concatenate([group[_deal(load[group], devices // num_groups)] for group in groups])
    return order if device_load(load[order], devices).max() < device_load(load, devices).max() else as_it_is


def device_load(expert_load: Float[np.ndarray, "*layers experts"], devices: int) -> Float[np.ndarray, "*layers devices"]:
    """The choices that each device computes: the sum over the experts that it holds."""
    load = np.asarray(expert_load)
    return load.reshape(*load.shape[:-1], devices, -1).sum(axis=-1)


def _deal(load: Float[np.ndarray, "items"], devices: int) -> Int[np.ndarray, "items"]:
    """The item for each place."""
    places = len(load) // devices
    held: list[list[int]] = [[] for _ in range(devices)]
    loads = np.zeros(devices)
    for item in np.argsort(-load, kind="stable"):
        device = min((d for d in range(devices) if len(held[d]) < places), key=lambda d: loads[d])
        held[device].append(int(item))
        loads[device] += load[item]
    return np.concatenate([np.sort(items) for items in held])
