"""Fully sharded parameters: each device keeps a part of every matrix and gathers the whole where it is used.

ZeRO, stage 3 (Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054), with the precisions of torch's FSDP2: matrices are
gathered in the compute dtype; each device sends its gradients in that dtype to the devices that keep the parts, which sum
them in f32. All of it happens inside `jax.shard_map` under `check_vma`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array

from moe_jax.kernels.precision import widened
from moe_jax.kernels.varying import varying_axes
from moe_jax.parallel.choices import Hops
from moe_jax.parallel.collectives.direct import add_contributions, join_parts, send_contributions, send_part
from moe_jax.parallel.collectives.sums import sum_scatter
from moe_jax.parallel.layout import gathered_axes, parameter_path, parameter_spec

Gather = tuple[tuple[int, tuple[str, ...]], ...]
"""How an array comes out of the devices' parts: (an axis, the last is -1; the mesh axes over which it is joined), as often as
need be. () if the array is whole."""


@dataclass(frozen=True)
class LayerGather:
    """How the parameters of one layer are gathered, in the order of the leaves; what stays as it is has no mesh axes."""

    gathers: tuple[Gather, ...]
    dtype: jnp.dtype
    """In which matrices travel and are computed with."""
    hops: Hops = "nccl"
    """Whether they travel by NCCL's collectives or by copies."""

    @classmethod
    def of_nothing(cls, num_leaves: int) -> "LayerGather":
        """For a layer that lies whole on the device."""
        return cls(((),) * num_leaves, jnp.dtype(jnp.float32))

    def fetch(self, parts) -> list[Array]:
        """Those of the layer's parameters that are gathered, whole, of this device's parts."""
        return self.receive(self.send(parts))

    def send(self, parts) -> list:
        """What `receive` makes them of."""
        return [_sent(how, self.dtype, self.hops, part) for how, part in zip(self._travels, self.split(parts)[0], strict=True)]

    def receive(self, sent: list) -> list[Array]:
        """What `fetch` returns."""
        return [_received(how, self.hops, arrived) for how, arrived in zip(self._travels, sent, strict=True)]

    def behind(self, computed, sent):
        """Both. By copies, what was sent is received not before `computed` is there: XLA would wait for it long before.

        Over NCCL, one collective at a time, steps were no faster so (docs/performance.md).
        """
        return lax.optimization_barrier((computed, sent)) if self.hops == "copies" else (computed, sent)

    def layer(self, parts, fetched: list[Array]):
        """The layer's parameters: those fetched, and those that stay."""
        return self.join(parts, fetched, self.split(parts)[1])

    def send_gradients(self, gradients: list[Array]) -> list:
        """Of gradients of what was fetched, what `receive_gradients` makes this device's parts of."""
        return [_sent_back(how, self.hops, gradient) for how, gradient in zip(self._travels, gradients, strict=True)]

    def receive_gradients(self, sent: list, like: list[Array]) -> list[Array]:
        """This device's parts, summed over the devices, in the dtypes of `like`."""
        triples = zip(self._travels, sent, like, strict=True)
        return [_received_back(how, self.hops, arrived).astype(part.dtype) for how, arrived, part in triples]

    def split(self, tree) -> tuple[list[Array], list[Array]]:
        """(leaves that travel, leaves that stay)."""
        pairs = list(zip(self.gathers, jax.tree.leaves(tree), strict=True))
        return [leaf for how, leaf in pairs if how], [leaf for how, leaf in pairs if not how]

    def join(self, tree, travelling: list[Array], staying: list[Array]):
        """A tree like `tree` of the two kinds of leaves."""
        kinds = iter(travelling), iter(staying)
        leaves = [next(kinds[0] if how else kinds[1]) for how in self.gathers]
        return jax.tree.unflatten(jax.tree.structure(tree), leaves)

    @property
    def _travels(self) -> list[Gather]:
        return [how for how in self.gathers if how]


@dataclass(frozen=True)
class ShardedParameters:
    """A model's parameters inside `jax.shard_map`: `specs` lays them out, `enter` makes of parts what the model takes.

    sharded = ShardedParameters.of(params, mesh, dtype=jnp.bfloat16, token_axes=("fsdp", "expert"))

    def local(params, tokens):
        model = nnx.merge(graph, sharded.enter(params))
        return model.hidden_states(tokens, spread=Spread(ExpertParallel(), layer_gathers=sharded.layers))

    jax.shard_map(local, mesh=mesh, in_specs=(sharded.specs, P(("fsdp", "expert"))), ...)

    Experts stay split over `expert`: on a mesh with more than one device there, tokens travel to them by `Spread.expert`.
    """

    specs: nnx.State
    """A PartitionSpec for each parameter."""
    layers: tuple[LayerGather, ...]
    """One for each stage of the model."""
    outside: dict[tuple, Gather]
    """By path, of the parameters outside the stages that are gathered."""
    dtype: jnp.dtype
    token_axes: tuple[str, ...]
    hops: Hops = "nccl"

    @classmethod
    def of(
        cls, params: nnx.State, mesh: Mesh | AbstractMesh, *, dtype: jnp.dtype, token_axes: Sequence[str], hops: Hops = "nccl"
    ) -> "ShardedParameters":
        """For the parameters (arrays or their shapes) of a model.

        Args:
          dtype: in which matrices are gathered: the model's.
          token_axes: the mesh axes over which tokens are split, so that gradients are summed over them.
          hops: "copies" where the program is compiled with `Parallelism.compiler_options`.

        Raises:
          ValueError: experts that the mesh axis `expert` does not divide.
        """
        for path, p in jax.tree.leaves_with_path(params):
            names = parameter_path(path)
            ways = mesh.shape.get("expert", 1)
            if names[-1] == "gate_up_proj" and p.shape[-3] % ways:
                raise ValueError(f"{p.shape[-3]} experts cannot be dealt out to expert={ways} devices; take a divisor")
        specs = jax.tree.map_with_path(lambda path, p: parameter_spec(parameter_path(path), p.shape, mesh), params)
        gathers = {
            names: gathered_axes(names, p.shape, mesh)
            for names, p in ((parameter_path(path), p) for path, p in jax.tree.leaves_with_path(params))
        }
        stages = sorted({names[1] for names in gathers if names[0] == "stages"})
        layers = (
            LayerGather(tuple(how for names, how in gathers.items() if names[:2] == ("stages", stage)), jnp.dtype(dtype), hops)
            for stage in stages
        )
        outside = {names: how for names, how in gathers.items() if names[0] != "stages" and how}
        return cls(specs, tuple(layers), outside, jnp.dtype(dtype), tuple(token_axes), hops)

    def enter(self, params: nnx.State) -> nnx.State:
        """Parameters for the model: whole outside the stages, in parts within, which the layers gather one ahead.

        Their gradients are those of this device's parts, summed in f32 over all axes along which tokens are split.
        """

        def enter(path, part):
            part = _summed_over(part, tuple(sorted({*self.token_axes} - varying_axes(part))))
            how = self.outside.get(parameter_path(path))
            return part if how is None else _gathered(how, self.dtype, self.hops, part)

        return jax.tree.map_with_path(enter, params)

    def gathered(self, params: nnx.State) -> nnx.State:
        """All parameters but the experts whole, at once: for a program without gradients that uses them again and again."""
        params = self.enter(params)
        gathers = zip(sorted(params["stages"].items()), self.layers, strict=True)
        stages = {name: gather.layer(stage, gather.fetch(stage)) for (name, stage), gather in gathers}
        return nnx.merge_state(params, nnx.State({"stages": stages}))


def _sent(how: Gather, dtype: jnp.dtype, hops: Hops, part: Array):
    part = part.astype(dtype)
    *inner, (axis, mesh_axes) = how
    for inner_axis, inner_axes in inner:
        part = lax.all_gather(part, inner_axes, axis=part.ndim + inner_axis, tiled=True)
    if hops == "copies":
        return send_part(part, mesh_axes)
    return lax.all_gather(part, mesh_axes, axis=part.ndim + axis, tiled=True)


def _received(how: Gather, hops: Hops, sent) -> Array:
    axis, mesh_axes = how[-1]
    return join_parts(sent, mesh_axes, sent[0].ndim + axis) if hops == "copies" else sent


def _sent_back(how: Gather, hops: Hops, gradient: Array):
    axis, mesh_axes = how[-1]
    if hops == "copies":
        return send_contributions(gradient, mesh_axes, gradient.ndim + axis)
    return sum_scatter(gradient, mesh_axes, gradient.ndim + axis)


def _received_back(how: Gather, hops: Hops, sent) -> Array:
    gradient = add_contributions(sent) if hops == "copies" else sent
    for axis, mesh_axes in reversed(how[:-1]):
        gradient = sum_scatter(gradient, mesh_axes, gradient.ndim + axis)
    return gradient


def _whole(how: Gather, dtype: jnp.dtype, hops: Hops, part: Array) -> Array:
    return _received(how, hops, _sent(how, dtype, hops, part))


def _own_part(how: Gather, dtype: jnp.dtype, hops: Hops, gradient: Array) -> Array:
    return _received_back(how, hops, _sent_back(how, hops, gradient)).astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gathered(how: Gather, dtype: jnp.dtype, hops: Hops, part: Array) -> Array:
    return _whole(how, dtype, hops, part)


_gathered.defvjp(
    lambda how, dtype, hops, part: (_whole(how, dtype, hops, part), jnp.zeros(0, part.dtype)),
    lambda how, _, hops, like, gradient: (_own_part(how, like.dtype, hops, gradient),),
)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _summed_over(parameter: Array, axes: tuple[str, ...]) -> Array:
    """The parameter, for use with different tokens along `axes`; gradients are summed over these in f32."""
    return lax.pcast(parameter, axes, to="varying") if axes else parameter


_summed_over.defvjp(
    lambda parameter, axes: (_summed_over(parameter, axes), None),
    lambda axes, _, g: (lax.psum(widened(g), axes).astype(g.dtype) if axes else g,),
)
