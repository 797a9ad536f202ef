"""Fully sharded parameters: each device keeps a part of every matrix and gathers the full matrix for use.

ZeRO, stage 3 (Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054), with the precisions of torch's FSDP2. Matrices are
gathered in the compute dtype; experts that multiply in FP8 are gathered in FP8. Each device sends its gradients in the compute
dtype to the devices that keep the parts, which sum them in f32. All code here runs inside `jax.shard_map` under `check_vma`.

In FP8 half the bytes travel: the device that keeps a part rounds it. A block of 128 x 128 has its own scale. So rounding before
or after the gather yields the same bits, as long as no part's edge cuts a block.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float

from moe_jax.kernels.experts.fp8.quantise import GROUP, InFp8, QuantisedMatrices, quantise_matrices
from moe_jax.kernels.experts.weights import Matrix
from moe_jax.kernels.precision import at_least_f32, widened
from moe_jax.kernels.shapes import vary_as, varying_axes
from moe_jax.layers.passes import WholeLayer
from moe_jax.parallel.choices import Hops
from moe_jax.parallel.collectives.hops import add_contributions, join_parts, send_contributions, send_part, sum_scatter
from moe_jax.parallel.layout import gathered_axes, parameter_path, parameter_spec, part_shape

Gather = tuple[tuple[int, tuple[str, ...]], ...]
"""The joins that assemble an array from the devices' parts, in order: (array axis, counted from the end; mesh axes that split
it). () if the array is whole on every device."""


@dataclass(frozen=True)
class LayerGather(WholeLayer):
    """Per-layer FSDP communication: all-gather of parameters, reduce-scatter of gradients, each split into start and finish.

    A tree of the layer's parameters has leaves that are gathered and leaves that are whole on every device.
    """

    gathers: tuple[Gather, ...]
    """The gather of each leaf, in leaf order; () for a leaf that is whole."""
    dtype: jnp.dtype
    """Dtype in which matrices travel and compute."""
    hops: Hops = "nccl"
    """"nccl": by collectives of NCCL. "copies": by peer-to-peer copies."""
    in_fp8: frozenset[int] = frozenset()
    """The indices of gathered leaves that travel in FP8. After the gather each is a `Matrix`."""

    def without(self, left_out: Sequence[bool]) -> "LayerGather":
        """Returns a copy that skips the leaves flagged in `left_out`."""
        kept = [i for i, out in enumerate(left_out) if not out]
        in_fp8 = frozenset(place for place, i in enumerate(kept) if i in self.in_fp8)
        return replace(self, gathers=tuple(self.gathers[i] for i in kept), in_fp8=in_fp8)

    def start_gather(self, parts) -> list:
        """Starts the all-gather of the layer's parameters; pass the result to `finish_gather`."""

        def start(how: Gather, in_fp8: bool, part: Array):
            if not in_fp8:
                return _start_gather(how, self.dtype, self.hops, part)
            rounded = _round_part(part, self.dtype)
            # XLA may widen a transfer of FP8 to 16 bits, but none of bytes.
            sent = lax.bitcast_convert_type(rounded.values, jnp.uint8), rounded.scales
            return [_start_gather(how, a.dtype, self.hops, a) for a in sent]

        return [start(*how, part) for how, part in zip(self._moving, self.split(parts)[0], strict=True)]

    def finish_gather(self, arriving: list) -> list[Any]:
        """Waits for the all-gather and returns the full parameters; FP8 ones are `QuantisedMatrices`."""

        def finish(how: Gather, in_fp8: bool, sent):
            if not in_fp8:
                return _finish_gather(how, self.hops, sent)
            values, scales = (_finish_gather(how, self.hops, a) for a in sent)
            return QuantisedMatrices(lax.bitcast_convert_type(values, jnp.float8_e4m3fn), scales)

        return [finish(*how, sent) for how, sent in zip(self._moving, arriving, strict=True)]

    def barrier(self, computed, arriving):
        """Returns both unchanged; with peer-to-peer copies, delays the wait for a transfer until `computed` is ready.

        Without the barrier XLA waits much earlier. With NCCL, which runs one collective at a time, the barrier made steps no
        faster (docs/log/parallel.md), so there is none.
        """
        return lax.optimization_barrier((computed, arriving)) if self.hops == "copies" else (computed, arriving)

    def layer(self, parts, gathered: list[Any]):
        """Combines gathered leaves with the replicated leaves of `parts` into the layer's parameters."""
        full = [_as_parameter(a, self.dtype) if isinstance(a, QuantisedMatrices) else a for a in gathered]
        return self.join(parts, full, self.split(parts)[1])

    def zero_gradients(self, gathered: list[Any]) -> list[Array]:
        """Returns zeros for `start_scatter`, in the shapes of the gathered parameters' gradients."""

        def zeros(a: Array | QuantisedMatrices) -> Array:
            return _like(a, self.dtype, 0) if isinstance(a, QuantisedMatrices) else jnp.zeros_like(a)

        return [zeros(a) for a in gathered]

    def start_scatter(self, gradients: list[Array]) -> list:
        """Starts the reduce-scatter of gradients of gathered parameters; pass the result to `finish_scatter`."""
        return [_start_scatter(how, self.hops, gradient) for (how, _), gradient in zip(self._moving, gradients, strict=True)]

    def finish_scatter(self, arriving: list, like: list[Array]) -> list[Array]:
        """Waits for the reduce-scatter and returns the gradients of this device's shards, in the dtypes of `like`."""
        triples = zip(self._moving, arriving, like, strict=True)
        return [_finish_scatter(how, self.hops, array).astype(part.dtype) for (how, _), array, part in triples]

    def split(self, tree) -> tuple[list[Array], list[Array]]:
        """Returns (gathered leaves, replicated leaves); a `Matrix` contributes its values."""
        leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, Matrix))
        arrays: Iterable[Any] = (leaf.values if isinstance(leaf, Matrix) else leaf for leaf in leaves)
        pairs = list(zip(self.gathers, arrays, strict=True))
        return [leaf for how, leaf in pairs if how], [leaf for how, leaf in pairs if not how]

    def join(self, tree, gathered: list[Any], whole: list[Array]):
        """Inverts `split`; `tree` defines the structure."""
        kinds = iter(gathered), iter(whole)
        leaves = [next(kinds[0] if how else kinds[1]) for how in self.gathers]
        return jax.tree.unflatten(jax.tree.structure(tree), leaves)

    @property
    def _moving(self) -> list[tuple[Gather, bool]]:
        """The gather of each leaf that is gathered, and True if it travels in FP8."""
        return [(how, i in self.in_fp8) for i, how in enumerate(self.gathers) if how]


def _as_parameter(rounded: QuantisedMatrices, dtype: jnp.dtype) -> Matrix:
    """Returns FP8 matrices with a placeholder for the gradient: NaN in the weights' shape, since nothing may read it."""
    return Matrix(_like(rounded, dtype, jnp.nan), InFp8(rounded))


def _like(rounded: QuantisedMatrices, dtype: jnp.dtype, fill: float) -> Float[Array, "experts n k"]:
    return vary_as(jnp.full(rounded.values.shape, fill, dtype), rounded.values)


@dataclass(frozen=True)
class ShardedParameters:
    """FSDP parameters inside `jax.shard_map`: `specs` shards them, `enter` turns local shards into model parameters.

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
    """A gather for each stage of the model."""
    outside: dict[tuple, Gather]
    """Gathers of the parameters outside the stages, by path; whole parameters are left out."""
    dtype: jnp.dtype
    token_axes: tuple[str, ...]
    hops: Hops = "nccl"

    @classmethod
    def of(
        cls,
        params: nnx.State,
        mesh: Mesh | AbstractMesh,
        *,
        dtype: jnp.dtype,
        token_axes: Sequence[str],
        hops: Hops = "nccl",
        experts_in_fp8: bool = False,
    ) -> "ShardedParameters":
        """Plans the sharding of a model's parameters (arrays or shapes) on a mesh.

        Args:
          dtype: dtype in which matrices are gathered: the model's.
          token_axes: the mesh axes over which tokens are split. Gradients are summed over them.
          hops: "copies" if the program is compiled with `Parallelism.compiler_options`.
          experts_in_fp8: layers multiply their experts in FP8, so experts travel in FP8 if parts are whole blocks.

        Raises:
          ValueError: experts that the mesh axis `expert` does not divide.
        """
        for path, p in jax.tree.leaves_with_path(params):
            names = parameter_path(path)
            ways = mesh.shape.get("expert", 1)
            if names[-1] == "gate_up_proj" and p.shape[-3] % ways:
                raise ValueError(f"{p.shape[-3]} experts cannot be divided among expert={ways} devices; take a divisor")
        specs = jax.tree.map_with_path(lambda path, p: parameter_spec(parameter_path(path), p.shape, mesh), params)
        shapes = {parameter_path(path): p.shape for path, p in jax.tree.leaves_with_path(params)}
        gathers = {names: gathered_axes(names, shape, mesh) for names, shape in shapes.items()}

        def of_stage(stage: int) -> LayerGather:
            own = [names for names in gathers if names[:2] == ("stages", stage)]
            experts = {i: names for i, names in enumerate(own) if "experts" in names} if experts_in_fp8 else {}
            # A layer's two matrices travel in the same form.
            can_travel = all(can_travel_in_fp8(names, shapes[names], mesh) for names in experts.values())
            in_fp8 = frozenset(experts if can_travel else ())
            return LayerGather(tuple(gathers[names] for names in own), jnp.dtype(dtype), hops, in_fp8)

        layers = map(of_stage, sorted({names[1] for names in gathers if names[0] == "stages"}))
        outside = {names: how for names, how in gathers.items() if names[0] != "stages" and how}
        return cls(specs, tuple(layers), outside, jnp.dtype(dtype), tuple(token_axes), hops)

    def enter(self, params: nnx.State) -> nnx.State:
        """Returns model parameters from local shards: gathered outside the layers; layers gather theirs one layer ahead.

        The gradient of a part is summed in f32 over all axes along which tokens are split.
        """

        def enter(path, part):
            part = _summed_over(part, tuple(sorted({*self.token_axes} - varying_axes(part))))
            how = self.outside.get(parameter_path(path))
            return part if how is None else _gathered(how, self.dtype, self.hops, part)

        return jax.tree.map_with_path(enter, params)

    def leave(self, params: nnx.State, gradients: nnx.State) -> nnx.State:
        """Reduces gradients of `enter`'s results to gradients of this device's shards.

        It is the transpose of `enter`, without rounding: gradients are in f32 (f64 for f64) before and after their sum over
        devices.
        """
        wide = replace(self, dtype=jnp.dtype(at_least_f32(self.dtype)))
        _, transposed = jax.vjp(wide.enter, jax.tree.map(lambda part: part.astype(wide.dtype), params))
        return transposed(gradients)[0]

    def gathered(self, params: nnx.State) -> nnx.State:
        """All-gathers all parameters except experts at once, for gradient-free programs such as decoding."""
        params = self.enter(params)
        if "stages" not in params:
            # All layers are frozen, and so are not parameters.
            return params
        gathers = zip(sorted(params["stages"].items()), self.layers, strict=True)
        stages = {name: gather.layer(stage, gather.gather(stage)) for (name, stage), gather in gathers}
        return nnx.merge_state(params, nnx.State({"stages": stages}))


def _start_gather(how: Gather, dtype: jnp.dtype, hops: Hops, part: Array):
    part = part.astype(dtype)
    *inner, (axis, mesh_axes) = how
    for inner_axis, inner_axes in inner:
        part = lax.all_gather(part, inner_axes, axis=part.ndim + inner_axis, tiled=True)
    if hops == "copies":
        return send_part(part, mesh_axes)
    return lax.all_gather(part, mesh_axes, axis=part.ndim + axis, tiled=True)


def _finish_gather(how: Gather, hops: Hops, sent) -> Array:
    axis, mesh_axes = how[-1]
    return join_parts(sent, mesh_axes, sent[0].ndim + axis) if hops == "copies" else sent


def _start_scatter(how: Gather, hops: Hops, gradient: Array):
    axis, mesh_axes = how[-1]
    if hops == "copies":
        return send_contributions(gradient, mesh_axes, gradient.ndim + axis)
    return sum_scatter(gradient, mesh_axes, gradient.ndim + axis)


def _finish_scatter(how: Gather, hops: Hops, sent) -> Array:
    gradient = add_contributions(sent) if hops == "copies" else sent
    for axis, mesh_axes in reversed(how[:-1]):
        gradient = sum_scatter(gradient, mesh_axes, gradient.ndim + axis)
    return gradient


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gathered(how: Gather, dtype: jnp.dtype, hops: Hops, part: Array) -> Array:
    return _finish_gather(how, hops, _start_gather(how, dtype, hops, part))


_gathered.defvjp(
    lambda how, dtype, hops, part: (_gathered(how, dtype, hops, part), jnp.zeros(0, part.dtype)),
    lambda how, _, hops, like, g: (_finish_scatter(how, hops, _start_scatter(how, hops, g)).astype(like.dtype),),
)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _summed_over(parameter: Array, axes: tuple[str, ...]) -> Array:
    """Returns the parameter for use with different tokens along `axes`; its gradient is summed over them in f32."""
    return lax.pcast(parameter, axes, to="varying") if axes else parameter


_summed_over.defvjp(
    lambda parameter, axes: (_summed_over(parameter, axes), None),
    lambda axes, _, g: (lax.psum(widened(g), axes).astype(g.dtype) if axes else g,),
)


def _round_part(part: Float[Array, "*stack n k"], dtype: jnp.dtype) -> QuantisedMatrices:
    """Rounds a part to the dtype of the computation and then to FP8, as if it had been gathered in that dtype."""
    # A cast to bf16 and back is one that XLA may leave out.
    info = jnp.finfo(dtype)
    return quantise_matrices(lax.reduce_precision(lax.stop_gradient(part), info.nexp, info.nmant))


def can_travel_in_fp8(path: tuple, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> bool:
    """Returns True if an expert matrix can be all-gathered in FP8: its shards consist of whole 128 x 128 blocks."""
    if "experts" not in path or not gathered_axes(path, shape, mesh):
        return False
    return not any(size % GROUP for size in part_shape(path, shape, mesh)[-2:])
