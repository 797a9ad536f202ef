"""Chooses which experts share a device, so that all devices have about the same work."""

import numpy as np
from jaxtyping import Int, Num


def balanced_order(expert_load: Num[np.ndarray, "experts"], devices: int, num_groups: int = 1) -> Int[np.ndarray, "experts"]:
    """Assigns experts to devices by load: out[i] is the expert at position i. Device d of n holds positions d*E/n to (d+1)*E/n.

    Experts are assigned in order of decreasing load, each to the device with the least load and a free position. This is
    Graham's longest-processing-time rule with E/n positions per device. DeepSeek's EPLB (https://github.com/deepseek-ai/EPLB)
    does the same, and also copies experts.

    A router with group-limited routing chooses among `num_groups` equal groups of consecutive experts. A group stays together:
    each device gets whole groups. If a group fills several devices, its experts are assigned to these.

    If the new order does not lower the load of the busiest device, every expert stays where it is.

    Raises:
      ValueError: experts or groups that cannot be split evenly over the devices; loads that are not one number of at least 0
        for each expert.
    """
    load = np.asarray(expert_load)
    if load.ndim != 1:
        raise ValueError(f"expert_load must have shape [experts]; got {list(load.shape)}")
    valid = np.isfinite(load) & (load >= 0)
    if not valid.all():
        raise ValueError(f"expert_load must hold numbers of at least 0; got {load[~valid][0]} for one expert")
    if devices < 1 or len(load) % devices:
        raise ValueError(f"{len(load)} experts cannot be divided among {devices} devices; use a divisor")
    if num_groups < 1 or len(load) % num_groups:
        raise ValueError(f"{len(load)} experts are not {num_groups} groups of one size")
    if num_groups % devices and devices % num_groups:
        raise ValueError(
            f"{num_groups} groups of experts cannot be divided among {devices} devices; use a divisor or a multiple"
        )
    unchanged = np.arange(len(load), dtype=np.int32)
    groups = unchanged.reshape(num_groups, -1)
    if devices <= num_groups:
        order = groups[_assign(load[groups].sum(axis=1), devices)].reshape(-1)
    else:
        order = np.concatenate([group[_assign(load[group], devices // num_groups)] for group in groups])
    return order if device_load(load[order], devices).max() < device_load(load, devices).max() else unchanged


def device_load(expert_load: Num[np.ndarray, "*layers experts"], devices: int) -> Num[np.ndarray, "*layers devices"]:
    """Returns the number of choices per device: the sum over the experts that it holds."""
    load = np.asarray(expert_load)
    return load.reshape(*load.shape[:-1], devices, -1).sum(axis=-1)


def _assign(load: Num[np.ndarray, "items"], devices: int) -> Int[np.ndarray, "items"]:
    """Returns the item for each position, in the order of the devices."""
    positions = len(load) // devices
    held: list[list[int]] = [[] for _ in range(devices)]
    loads = np.zeros(devices)
    for item in np.argsort(-load, kind="stable"):
        device = min((d for d in range(devices) if len(held[d]) < positions), key=lambda d: loads[d])
        held[device].append(int(item))
        loads[device] += load[item]
    return np.concatenate([np.sort(items) for items in held])
