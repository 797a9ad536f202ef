"""Which experts should share a device, so that the devices have as much to compute as each other."""

import numpy as np
from jaxtyping import Float, Int


def balanced_order(expert_load: Float[np.ndarray, "experts"], devices: int) -> Int[np.ndarray, "experts"]:
    """The expert for each place, where device d of n holds places d*E/n to (d+1)*E/n.

    The experts, the most loaded first, each go to the device with the least load that has room: Graham's rule of the longest
    processing time with E/n places a device, as in DeepSeek's EPLB (https://github.com/deepseek-ai/EPLB) without copies.

    Raises:
      ValueError: devices that the experts cannot be dealt out to.
    """
    num_experts = len(expert_load)
    if devices < 1 or num_experts % devices:
        raise ValueError(f"{num_experts} experts cannot be dealt out to {devices} devices; take a divisor")
    places = num_experts // devices
    held: list[list[int]] = [[] for _ in range(devices)]
    loads = np.zeros(devices)
    for expert in np.argsort(-np.asarray(expert_load), kind="stable"):
        device = min((d for d in range(devices) if len(held[d]) < places), key=lambda d: loads[d])
        held[device].append(int(expert))
        loads[device] += expert_load[expert]
    return np.concatenate([np.sort(experts) for experts in held]).astype(np.int32)


def device_load(expert_load: Float[np.ndarray, "*layers experts"], devices: int) -> Float[np.ndarray, "*layers devices"]:
    """The choices that each device computes: the sum over the experts that it holds."""
    load = np.asarray(expert_load)
    return load.reshape(*load.shape[:-1], devices, -1).sum(axis=-1)
