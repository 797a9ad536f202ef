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
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, PyTree

from moe_jax.kernels.experts.fp8.quantise import GROUP, InFp8, QuantisedMatrices, quantise_matrices
from moe_jax.kernels.experts.weights import Matrix
from moe_jax.kernels.precision import at_least_f32, widened
from moe_jax.kernels.shapes import vary_as, varying_axes
from moe_jax.layers.lora import Frozen
from moe_jax.layers.passes import WholeLayer
from moe_jax.layers.quantised import is_quantised, matrices_with_path, splittable
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
    num_frozen: int = 0
    """Number of last leaves that have no gradients."""
    as_stored: tuple[tuple[int, jnp.dtype], ...] = ()
    """The indices and dtypes of leaves of quantised matrices, which travel in the bytes that are stored."""

    def without(self, left_out: Sequence[bool]) -> "LayerGather":
        """Returns a copy that skips the leaves flagged in `left_out`."""
        kept = [i for i, out in enumerate(left_out) if not out]
        in_fp8 = frozenset(place for place, i in enumerate(kept) if i in self.in_fp8)
        num_frozen = sum(i >= self._num_trained for i in kept)
        as_stored = tuple((kept.index(i), dtype) for i, dtype in self.as_stored if i in kept)
        gathers = tuple(self.gathers[i] for i in kept)
        return replace(self, gathers=gathers, in_fp8=in_fp8, num_frozen=num_frozen, as_stored=as_stored)

    @property
    def of_gradients(self) -> "LayerGather":
        """The gather of only the leaves with gradients, for `split` and `join` of gradients, and the scatter."""
        return self.without([i >= self._num_trained for i in range(len(self.gathers))])

    @property
    def of_frozen(self) -> "LayerGather":
        """The gather of only the leaves without gradients, for a layer without its adapters."""
        return self.without([i < self._num_trained for i in range(len(self.gathers))])

    def start_gather(self, parts) -> list:
        """Starts the all-gather of the layer's parameters; pass the result to `finish_gather`."""

        def start(how: Gather, in_fp8: bool, dtype: jnp.dtype, part: Array):
            if not in_fp8:
                return _start_gather(how, dtype, self.hops, part)
            return [_start_gather(how, a.dtype, self.hops, a) for a in _round_part(part, dtype)]

        return [start(*how, part) for how, part in zip(self._moving, self.split(parts)[0], strict=True)]

    def finish_gather(self, arriving: list) -> list[Any]:
        """Waits for the all-gather and returns the full parameters; FP8 ones are `QuantisedMatrices`."""

        def finish(how: Gather, in_fp8: bool, dtype: jnp.dtype, sent):
            if not in_fp8:
                return _finish_gather(how, dtype, self.hops, sent)
            dtypes = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float32)
            return QuantisedMatrices(*(_finish_gather(how, d, self.hops, a) for d, a in zip(dtypes, sent, strict=True)))

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

        return [zeros(a) for a in gathered[: len(self._moving)]]

    def start_scatter(self, gradients: list[Array]) -> list:
        """Starts the reduce-scatter of gradients of gathered parameters; pass the result to `finish_scatter`."""
        pairs = zip(self._moving, gradients, strict=True)
        return [_start_scatter(how, self.hops, gradient) for (how, *_), gradient in pairs]

    def finish_scatter(self, arriving: list, like: list[Array]) -> list[Array]:
        """Waits for the reduce-scatter and returns the gradients of this device's shards, in the dtypes of `like`."""
        triples = zip(self._moving, arriving, like, strict=True)
        return [_finish_scatter(how, self.hops, array).astype(part.dtype) for (how, *_), array, part in triples]

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
    def _moving(self) -> list[tuple[Gather, bool, jnp.dtype]]:
        """The gather of each leaf that is gathered, True if it is rounded to FP8 first, and the dtype in which it travels."""
        dtypes = dict(self.as_stored)
        return [(how, i in self.in_fp8, dtypes.get(i, self.dtype)) for i, how in enumerate(self.gathers) if how]

    @property
    def _num_trained(self) -> int:
        return len(self.gathers) - self.num_frozen


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
    fixed_specs: nnx.State | None = None
    """A PartitionSpec for each array of `fixed`."""

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
        fixed: nnx.State | None = None,
    ) -> "ShardedParameters":
        """Plans the sharding of a model's parameters (arrays or shapes) on a mesh.

        Args:
          fixed: the rest of the model. Its frozen matrices are laid out like parameters; all else is whole on every device.
          dtype: dtype in which matrices are gathered: the model's.
          token_axes: the mesh axes over which tokens are split. Gradients are summed over them.
          hops: "copies" if the program is compiled with `Parallelism.compiler_options`.
          experts_in_fp8: layers multiply their experts in FP8, so experts travel in FP8 if parts are whole blocks.

        Raises:
          ValueError: experts that the mesh axis `expert` does not divide.
        """
        frozen, _ = nnx.split_state(fixed or nnx.State({}), Frozen, ...)
        trained = {parameter_path(path) for path, _ in jax.tree.leaves_with_path(params)}
        matrices = {parameter_path(path): p for tree in (params, frozen) for path, p in matrices_with_path(tree)}
        for names, p in matrices.items():
            ways = mesh.shape.get("expert", 1)
            if names[-1] == "gate_up_proj" and p.shape[-3] % ways:
                raise ValueError(f"{p.shape[-3]} experts cannot be divided among expert={ways} devices; use a divisor")
        gathers = {names: gathered_axes(names, splittable(p), mesh) for names, p in matrices.items()}

        def spec(path: tuple, _: Any) -> PartitionSpec:
            names = parameter_path(path)
            return parameter_spec(names, splittable(matrices[names]), mesh) if names in matrices else PartitionSpec()

        def of_stage(stage: int) -> LayerGather:
            # A quantised matrix has several leaves.
            own = [(names, a) for names, p in matrices.items() if names[:2] == ("stages", stage) for a in jax.tree.leaves(p)]
            experts = {i: names for i, (names, _) in enumerate(own) if names in trained and "experts" in names}
            # A layer's two matrices travel in the same form.
            can_travel = experts_in_fp8 and all(can_travel_in_fp8(n, matrices[n].shape, mesh) for n in experts.values())
            return LayerGather(
                tuple(gathers[names] for names, _ in own),
                jnp.dtype(dtype),
                hops,
                frozenset(experts if can_travel else ()),
                sum(names not in trained for names, _ in own),
                tuple((i, jnp.dtype(a.dtype)) for i, (names, a) in enumerate(own) if is_quantised(matrices[names])),
            )

        layers = map(of_stage, sorted({names[1] for names in gathers if names[0] == "stages"}))
        outside = {names: how for names, how in gathers.items() if names[0] != "stages" and how}
        specs, fixed_specs = (jax.tree.map_with_path(spec, tree) for tree in (params, fixed))
        return cls(specs, tuple(layers), outside, jnp.dtype(dtype), tuple(token_axes), hops, fixed_specs)

    def enter(self, params: nnx.State) -> nnx.State:
        """Returns model parameters from local shards: gathered outside the layers; layers gather theirs one layer ahead.

        The gradient of a part is summed in f32 over all axes along which tokens are split.
        """

        def enter(path, part):
            return self._whole(path, _summed_over(part, self._missing_axes(part)))

        return jax.tree.map_with_path(enter, params)

    def enter_fixed(self, fixed: nnx.State) -> nnx.State:
        """Returns the rest of the model, as `enter` does; nothing of it has a gradient."""
        frozen, others = nnx.split_state(fixed, Frozen, ...)
        # A layer would cast its weights to vary as its tokens do. Layers that keep their residuals would keep these copies.
        frozen = jax.tree.map(lambda part: _varying(part, self._missing_axes(part)), frozen)
        return jax.tree.map_with_path(self._whole, nnx.merge_state(frozen, others))

    def _missing_axes(self, part: Array) -> tuple[str, ...]:
        """Returns the mesh axes over which tokens are split and the part does not vary."""
        return tuple(sorted({*self.token_axes} - varying_axes(part)))

    def _whole(self, path: tuple, part: Array) -> Array:
        """Returns the full parameter outside the stages; inside, the part."""
        how = self.outside.get(parameter_path(path))
        return part if how is None else _gathered(how, self.dtype, self.hops, part)

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


def gathered_everywhere(tree: PyTree) -> PyTree:
    """Returns a tree of arrays that are whole on each device of their mesh, outside `jax.shard_map`.

    Arrays that are whole already are returned themselves. Stacks of layers are gathered layer by layer: a collective along a
    later axis needs a copy of its result.
    """
    leaves, structure = jax.tree.flatten(tree)
    split = [i for i, leaf in enumerate(leaves) if not leaf.is_fully_replicated]
    if split:
        layouts = tuple(leaves[i].sharding for i in split)
        for i, whole in zip(split, _gathered_leaves(layouts, [leaves[i] for i in split]), strict=True):
            leaves[i] = whole
    return jax.tree.unflatten(structure, leaves)


@partial(jax.jit, static_argnums=0)
def _gathered_leaves(layouts: tuple[NamedSharding, ...], leaves: list[Array]) -> list[Array]:
    def whole(spec: Sequence[Any], part: Array) -> Array:
        if part.ndim > 2 and not spec[0]:
            return lax.map(lambda layer: along_axes(spec[1:], layer), part)
        return along_axes(spec, part)

    def along_axes(spec: Sequence[Any], part: Array) -> Array:
        for axis, names in enumerate(spec):
            part = lax.all_gather(part, names, axis=axis, tiled=True) if names else part
        return part

    specs = [layout.spec for layout in layouts]
    gather = lambda parts: [whole(tuple(spec), part) for spec, part in zip(specs, parts, strict=True)]  # noqa: E731
    options: dict[str, Any] = dict(mesh=layouts[0].mesh, in_specs=(specs,), out_specs=PartitionSpec(), check_vma=False)
    return jax.shard_map(gather, **options)(leaves)


def _start_gather(how: Gather, dtype: jnp.dtype, hops: Hops, part: Array):
    part = part.astype(dtype)
    if _travels_as_bytes(dtype):
        part = lax.bitcast_convert_type(part, jnp.uint8)
    *inner, (axis, mesh_axes) = how
    for inner_axis, inner_axes in inner:
        part = lax.all_gather(part, inner_axes, axis=part.ndim + inner_axis, tiled=True)
    if hops == "copies":
        return send_part(part, mesh_axes)
    return lax.all_gather(part, mesh_axes, axis=part.ndim + axis, tiled=True)


def _finish_gather(how: Gather, dtype: jnp.dtype, hops: Hops, sent) -> Array:
    axis, mesh_axes = how[-1]
    whole = join_parts(sent, mesh_axes, sent[0].ndim + axis) if hops == "copies" else sent
    return lax.bitcast_convert_type(whole, dtype) if _travels_as_bytes(dtype) else whole


def _travels_as_bytes(dtype: jnp.dtype) -> bool:
    """Returns True for FP8: XLA may widen a transfer of FP8 to 16 bits, but none of bytes."""
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1


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
    return _finish_gather(how, dtype, hops, _start_gather(how, dtype, hops, part))


_gathered.defvjp(
    lambda how, dtype, hops, part: (_gathered(how, dtype, hops, part), jnp.zeros(0, part.dtype)),
    lambda how, _, hops, like, g: (_finish_scatter(how, hops, _start_scatter(how, hops, g)).astype(like.dtype),),
)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _summed_over(parameter: Array, axes: tuple[str, ...]) -> Array:
    """Returns the parameter for use with different tokens along `axes`; its gradient is summed over them in f32."""
    return _varying(parameter, axes)


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


def _varying(array: Array, axes: tuple[str, ...]) -> Array:
    return lax.pcast(array, axes, to="varying") if axes else array
