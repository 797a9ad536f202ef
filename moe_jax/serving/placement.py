"""The devices of an engine: the layout of its arrays, and how to run a program written for one device on each.

Each device has its own slots, pages and rows, numbered from 0. An array of all devices concatenates theirs along the first
axis. Weights are whole on every device, except that experts are split over the largest number of devices that divides their
number.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from moe_jax.generation.devices import AXES, devices_of, generation_mesh
from moe_jax.kernels.backends import on_one_device
from moe_jax.layers.moe import is_expert_matrix
from moe_jax.layers.spread import ONE_DEVICE, OneDevice
from moe_jax.models.decoder import Decoder
from moe_jax.parallel.expert import ExpertParallel
from moe_jax.parallel.layout import parameter_path
from moe_jax.parallel.spread import Spread

ROWS = PartitionSpec(AXES)
"""Splits the first axis over all devices."""


@dataclass(frozen=True)
class Placement:
    """The devices of an engine, in order."""

    devices: tuple[jax.Device, ...]
    mesh: Mesh | None
    """The mesh (fsdp, expert) of several devices; None for one."""

    @classmethod
    def of(cls, model: Decoder) -> "Placement":
        """Returns the devices that hold the model.

        Raises:
          ValueError: the model is on a mesh with several devices along `pipe`.
        """
        devices = tuple(devices_of(model, "an engine"))
        return cls(devices, generation_mesh(devices, model.config) if len(devices) > 1 else None)

    @classmethod
    def of_replicas(cls, model: Decoder, count: int) -> list["Placement"]:
        """Returns a placement for each of `count` replicas.

        A model that is whole on each of `count` devices has a replica there, which reads its device's copy. Otherwise the first
        replica is on the model's devices, and each other one on as many further devices of this process.

        Raises:
          ValueError: the process has fewer devices.
        """
        own = cls.of(model)
        if count == 1:
            return [own]
        size = len(own.devices)
        if count == size and all(leaf.is_fully_replicated for leaf in jax.tree.leaves(nnx.state(model))):
            return [cls((device,), None) for device in own.devices]
        all_devices = jax.local_devices(backend=own.devices[0].platform)
        if count * size > len(all_devices):
            each = "" if size == 1 else f" for replicas of {size} devices"
            raise ValueError(
                f"replicas must be at most {len(all_devices) // size}{each}: this process has {len(all_devices)} devices; "
                f"got {count}"
            )
        others = [device for device in all_devices if device not in own.devices]
        groups = (tuple(others[i * size : (i + 1) * size]) for i in range(count - 1))
        return [own, *(cls(group, generation_mesh(group, model.config) if size > 1 else None) for group in groups)]

    @property
    def name(self) -> str:
        """The names of the devices, for errors."""
        return ", ".join(map(str, self.devices))

    @property
    def rows(self) -> Sharding:
        """The sharding of arrays that have rows of each device."""
        return SingleDeviceSharding(self.devices[0]) if self.mesh is None else NamedSharding(self.mesh, ROWS)

    @property
    def whole(self) -> Sharding:
        """The sharding of arrays that each device holds whole."""
        return SingleDeviceSharding(self.devices[0]) if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

    def place(self, weights: Any) -> Any:
        """Moves weights (a pytree) to their devices. Stacked experts are split if the mesh splits experts."""

        def placed(path: tuple, array: jax.Array) -> jax.Array:
            if not splits_experts(self.mesh) or not is_expert_matrix(parameter_path(path)):
                return jax.device_put(array, self.whole)
            assert self.mesh is not None
            return jax.device_put(array, NamedSharding(self.mesh, PartitionSpec(None, "expert")))

        return jax.tree.map_with_path(placed, weights)


def splits_experts(mesh: Mesh | None) -> bool:
    """Returns True if each device of the mesh holds a part of the experts."""
    return mesh is not None and mesh.shape["expert"] > 1


def spread_on(mesh: Mesh | None) -> OneDevice:
    """Returns how calls of layers are spread in a program of `on_each`."""
    return Spread(expert=ExpertParallel()) if splits_experts(mesh) else ONE_DEVICE


def on_each(mesh: Mesh | None, function: Callable, in_specs: Any = ROWS, rows: PartitionSpec = ROWS) -> Callable:
    """Returns a program that runs `function` on each device, with the device's rows; without a mesh, on one.

    Args:
      in_specs: the layout of arguments, as in `jax.shard_map`; default: all have rows of each device.
      rows: the layout of results, on other meshes than an engine's.
    """
    if mesh is None:
        return on_one_device(function)
    # Nothing is differentiated, so kernels need not declare the axes over which their results vary.
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=rows, check_vma=False)


def rows_like(of_one: Any, mesh: Mesh | None) -> jax.ShapeDtypeStruct:
    """Returns the shape and layout of an array with rows of each device, from the shape of one device's rows."""
    if mesh is None:
        return jax.ShapeDtypeStruct(of_one.shape, of_one.dtype)
    shape = mesh.size * of_one.shape[0], *of_one.shape[1:]
    return jax.ShapeDtypeStruct(shape, of_one.dtype, sharding=NamedSharding(mesh, ROWS))
