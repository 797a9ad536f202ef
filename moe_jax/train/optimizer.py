"""AdamW, Muon and Adafactor with gradient clipping, and a learning rate that warms up linearly and falls along a cosine.

AdamW: Loshchilov and Hutter, 2019, https://arxiv.org/abs/1711.05101. Muon: Jordan et al., 2024,
https://kellerjordan.github.io/posts/muon, at AdamW's learning rates: Liu et al., 2025, https://arxiv.org/abs/2502.16982.
Adafactor: Shazeer and Stern, 2018, https://arxiv.org/abs/1804.04235. All work in f32 for any dtype of parameters:
`train.apply_gradients` passes them f32 gradients and masters.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from moe_jax.layers.matrices import declaration_of, is_orthogonalised
from moe_jax.parallel.choices import OptimizerName
from moe_jax.parallel.layout import optimizer_spec, parameter_path, parameter_spec
from moe_jax.parallel.parallelism import Parallelism

NOT_DECAYED = ("norm", "layernorm", "bias")
"""Weight decay skips a parameter if a part of its path ends in one of these: scales and offsets, not matrices."""


def warmup_cosine(learning_rate: float, *, steps: int, warmup_steps: int | None = 0, min_ratio: float = 0.1) -> optax.Schedule:
    """Returns the schedule rate * (t+1)/(warmup+1) for t < warmup, then a cosine from rate to rate * min_ratio at t = steps.

    `t` counts finished optimizer steps: the first step, t = 0, already has a nonzero rate. A warmup of None is a tenth of the
    steps, at most 100.
    """
    if warmup_steps is None:
        warmup_steps = min(100, steps // 10)

    def schedule(t):
        t = jnp.asarray(t, jnp.float32)
        rising = learning_rate * (t + 1) / (warmup_steps + 1)
        progress = ((t - warmup_steps) / max(steps - warmup_steps, 1)).clip(0, 1)
        falling = learning_rate * (min_ratio + (1 - min_ratio) * 0.5 * (1 + jnp.cos(jnp.pi * progress)))
        return jnp.where(t < warmup_steps, rising, falling)

    return schedule


def make_optimizer(
    learning_rate: float | optax.Schedule,
    *,
    name: OptimizerName = "adamw",
    weight_decay: float = 0.1,
    max_grad_norm: float | None = 1.0,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    moment_dtype: jax.typing.DTypeLike = jnp.float32,
) -> optax.GradientTransformation:
    """Returns an optimizer that first clips the global gradient norm (None: no clipping). Norms and biases do not decay.

    Args:
      name: "adamw"; "muon" (`scale_by_muon`), with AdamW for everything but the layers' matrices; "adafactor"
        (`scale_by_adafactor`). The same learning rates fit all three.
      weight_decay: each step subtracts learning_rate * weight_decay * parameter.
      b1, b2, eps: of AdamW, also within Muon.
      moment_dtype: the dtype of all moments between steps. In bf16 they use half the memory. A second moment then changes in
        steps of up to 0.8 %: 1 - b2 = 0.05 is large enough for that, 0.001 would not be.

    Raises:
      ValueError: an unknown name, or moments below f32 with b2 above 0.99 or Adafactor, whose b2 approaches 1.
    """
    if name not in RULES:
        raise ValueError(f"name={name!r} must be one of {', '.join(RULES)}")
    moment_dtype = jnp.dtype(moment_dtype)
    if moment_dtype.itemsize < 4 and name == "adafactor":
        raise ValueError(f"moments in {moment_dtype.name} are too coarse for Adafactor, whose b2 approaches 1: use float32")
    if moment_dtype.itemsize < 4 and b2 > 0.99:
        raise ValueError(f"moments in {moment_dtype.name} cannot follow b2={b2}: use float32, or b2 of at most 0.99")
    optimizer = optax.chain(
        RULES[name](b1, b2, eps),
        optax.add_decayed_weights(weight_decay, decayed),
        optax.scale_by_learning_rate(learning_rate),
    )
    if moment_dtype != jnp.float32:
        optimizer = _kept_in(optimizer, moment_dtype)
    return optimizer if max_grad_norm is None else optax.chain(optax.clip_by_global_norm(max_grad_norm), optimizer)


def scale_by_muon(b1: float, b2: float, eps: float, *, momentum: float = 0.95) -> optax.GradientTransformation:
    """Returns Muon's update of the layers' matrices, and AdamW's update of all other parameters.

        m = momentum * m + gradient
        update = 0.2 * sqrt(max(rows, columns)) * orthogonalised(gradient + momentum * m)

    Its elements have AdamW's usual root mean square, 0.2. Each expert's matrix is orthogonalised by itself, and so are its
    fused gate and up, and each factor of an adapter. Embedding, head, routers, their adapters, norms and biases get AdamW's
    update (`layers.matrices.is_orthogonalised`).

    `update` accepts the argument `parallelism`. Devices that share matrices then exchange parts with each other, so that each
    orthogonalises other whole matrices, a layer's at a time. Without it XLA chooses the collectives.
    """

    def of_matrices(params: PyTree) -> PyTree:
        return jax.tree.map_with_path(lambda path, p: is_orthogonalised(parameter_path(path), p.shape), params)

    def others(params: PyTree) -> PyTree:
        return jax.tree.map(lambda is_matrix: not is_matrix, of_matrices(params))

    def update(momenta, state, params=None, *, parallelism: Parallelism | None = None, **_):
        def orthogonalised(path: tuple, m: Array) -> Array:
            return _orthogonalised(parameter_path(path), m, parallelism)

        return jax.tree.map_with_path(orthogonalised, momenta), state

    orthogonalise = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    return optax.chain(
        optax.masked(optax.chain(optax.trace(momentum, nesterov=True), orthogonalise), of_matrices),
        optax.masked(optax.scale_by_adam(b1, b2, eps), others),
    )


class AdafactorState(NamedTuple):
    """The state of `scale_by_adafactor`.

    Attributes:
      steps: finished steps.
      moments: by parameter, the means of squared gradients over each matrix's rows and columns, [..., rows, 1] and
        [..., 1, columns]. For a vector, the mean of squared gradients.
    """

    steps: Int[Array, ""]
    moments: PyTree


def scale_by_adafactor(*, decay: float = 0.8, eps: float = 1e-30) -> optax.GradientTransformation:
    """Returns Adafactor's update without relative steps, scaling by parameters, or momentum.

    The second moment of a matrix is the product of its rows' and columns' moments, whose b2 is 1 - step^-decay. An update
    whose root mean square exceeds 1 is scaled down to 1. Matrices of a stack are independent of each other.
    """

    def init(params):
        def moments(path: tuple, p: Array) -> tuple[Array, ...]:
            if declaration_of(parameter_path(path), p.shape).axes == 1:
                return (jnp.zeros_like(p),)
            return jnp.zeros_like(p[..., :1]), jnp.zeros_like(p[..., :1, :])

        return AdafactorState(jnp.zeros((), jnp.int32), jax.tree.map_with_path(moments, params))

    def update(gradients, state, params=None):
        steps = state.steps + 1
        kept = 1 - steps.astype(jnp.float32) ** -decay

        def moments(g: Array, old: tuple[Array, ...]) -> tuple[Array, ...]:
            squares = g * g + eps
            new = (squares,) if len(old) == 1 else (squares.mean(-1, keepdims=True), squares.mean(-2, keepdims=True))
            return tuple(kept * before + (1 - kept) * now for before, now in zip(old, new, strict=True))

        found = jax.tree.map(moments, gradients, state.moments)
        return jax.tree.map(_scaled, gradients, found), AdafactorState(steps, found)

    return optax.GradientTransformation(init, update)


RULES: dict[str, Callable[[float, float, float], optax.GradientTransformation]] = {
    "adamw": optax.scale_by_adam,
    "muon": scale_by_muon,
    "adafactor": lambda b1, b2, eps: scale_by_adafactor(),
}
"""{name: update of AdamW's b1, b2 and eps}, before weight decay and the learning rate."""


def _kept_in(optimizer: optax.GradientTransformation, dtype: jnp.dtype) -> optax.GradientTransformation:
    """Returns the optimizer, computing in f32, with the arrays of its state kept in `dtype` between steps."""

    def cast(state, to):
        def cast_array(x):
            return x.astype(to) if jnp.issubdtype(x.dtype, jnp.floating) else x

        return jax.tree.map(cast_array, state)

    def update(gradients, state, params=None, **extra):
        updates, state = optimizer.update(gradients, cast(state, jnp.float32), params, **extra)
        return updates, cast(state, dtype)

    return optax.GradientTransformationExtraArgs(lambda params: cast(optimizer.init(params), dtype), update)


def decayed(params: PyTree) -> PyTree:
    """Returns True for each parameter with weight decay. Names decide, since stacking hides a parameter's own rank."""

    def is_decayed(path, _):
        names = (str(getattr(key, "key", getattr(key, "name", ""))) for key in path)
        return not any(name.endswith(NOT_DECAYED) for name in names)

    return jax.tree_util.tree_map_with_path(is_decayed, params)


def _scaled(gradient: Array, moments: tuple[Array, ...]) -> Array:
    """Divides a gradient by the root of its second moment, and scales it down to a root mean square of 1."""
    axes: tuple[int, ...] = (-1,)
    if len(moments) == 1:
        update = gradient * lax.rsqrt(moments[0])
    else:
        rows, columns = moments
        axes, update = (-2, -1), gradient * lax.rsqrt(rows / rows.mean(-2, keepdims=True)) * lax.rsqrt(columns)
    return update / jnp.maximum(1, jnp.sqrt(jnp.square(update).mean(axes, keepdims=True)))


Splits = list[tuple[int, tuple[str, ...]]]
"""The mesh axes that split a matrix's rows (axis 1 of a stack) and columns (2)."""


def _orthogonalised(path: tuple, momenta: Float[Array, "..."], parallelism: Parallelism | None) -> Float[Array, "..."]:
    """Orthogonalises each matrix of a stack of momenta, and scales it to a root mean square of about 0.2."""
    fused = 2 if path[-1] == "gate_up_proj" else 1
    if parallelism is None:
        return _by_layers(momenta, path=path, fused=fused, splits=[], ways=1)
    mesh = parallelism.mesh
    spec = (optimizer_spec if parallelism.splits_optimizer else parameter_spec)(path, momenta.shape, mesh)
    # A PartitionSpec may hold a single name as a string.
    splits = [(axis, (names,) if isinstance(names, str) else names) for axis, names in ((1, spec[-2]), (2, spec[-1])) if names]
    ways = math.prod(mesh.shape[name] for _, names in splits for name in names)
    own = partial(_by_layers, path=path, fused=fused, splits=splits, ways=ways)
    return jax.shard_map(own, mesh=mesh, in_specs=spec, out_specs=spec)(momenta)


def _by_layers(momenta: Float[Array, "..."], *, path: tuple, fused: int, splits: Splits, ways: int) -> Float[Array, "..."]:
    """Orthogonalises the matrices of a device's part of a stack, one layer at a time.

    Args:
      fused: the number of matrices that are joined along the rows of each.
      ways: the number of devices that share each matrix.
    """
    parts = momenta.reshape(-1, *momenta.shape[-2:])
    of_layer = momenta.shape[-3] if declaration_of(path, momenta.shape).axes == 3 else 1
    at_once = ways * -(-of_layer // ways)
    # Every device receives the same number of matrices; a matrix of zeros stays zeros.
    padded = jnp.pad(parts, ((0, -len(parts) % at_once), (0, 0), (0, 0)))

    def together(layer: Float[Array, "n rows columns"]) -> Float[Array, "n rows columns"]:
        for axis, names in splits:
            layer = lax.all_to_all(layer, names, split_axis=0, concat_axis=axis, tiled=True)
        n, rows, columns = layer.shape
        layer = newton_schulz(layer.reshape(n, fused, rows // fused, columns)).reshape(layer.shape)
        layer *= 0.2 * max(rows // fused, columns) ** 0.5
        for axis, names in reversed(splits):
            layer = lax.all_to_all(layer, names, split_axis=axis, concat_axis=0, tiled=True)
        return layer

    of_layers = lax.map(together, padded.reshape(-1, at_once, *parts.shape[1:]))
    return of_layers.reshape(padded.shape)[: len(parts)].reshape(momenta.shape)


def newton_schulz(matrices: Float[Array, "*stack rows columns"], *, steps: int = 5) -> Float[Array, "*stack rows columns"]:
    """Moves the singular values of each matrix to between about 0.7 and 1.2.

        X <- a X + (b A + c A A) X    with A = X X^T

    Matrices of zeros stay zeros.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if wide else matrices.mT
    x /= jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7
    for _ in range(steps):
        products = x @ x.mT
        x = a * x + (b * products + c * products @ products) @ x
    return x if wide else x.mT
