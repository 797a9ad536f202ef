"""AdamW with gradient clipping, and a learning rate that warms up linearly and falls along a cosine.

AdamW: Loshchilov and Hutter, 2019, https://arxiv.org/abs/1711.05101. The optimizer works in f32 for any dtype of parameters:
`train.apply_gradients` passes it f32 gradients and masters.
"""

import jax
import optax
from jaxtyping import PyTree

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
        t = jax.numpy.asarray(t, jax.numpy.float32)
        rising = learning_rate * (t + 1) / (warmup_steps + 1)
        progress = ((t - warmup_steps) / max(steps - warmup_steps, 1)).clip(0, 1)
        falling = learning_rate * (min_ratio + (1 - min_ratio) * 0.5 * (1 + jax.numpy.cos(jax.numpy.pi * progress)))
        return jax.numpy.where(t < warmup_steps, rising, falling)

    return schedule


def make_optimizer(
    learning_rate: float | optax.Schedule,
    *,
    weight_decay: float = 0.1,
    max_grad_norm: float | None = 1.0,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    moment_dtype: jax.typing.DTypeLike = jax.numpy.float32,
) -> optax.GradientTransformation:
    """Returns AdamW after clipping the global gradient norm (None: no clipping). Norms and biases do not decay.

    Args:
      moment_dtype: the dtype of both moments between steps. In bf16 they use half the memory. A second moment then changes in
        steps of up to 0.8 %: 1 - b2 = 0.05 is large enough for that, 0.001 would not be.

    Raises:
      ValueError: moments below f32 with b2 above 0.99.
    """
    moment_dtype = jax.numpy.dtype(moment_dtype)
    if moment_dtype.itemsize < 4 and b2 > 0.99:
        raise ValueError(f"moments in {moment_dtype.name} cannot follow b2={b2}: use float32, or b2 of at most 0.99")
    adamw = optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decayed)
    if moment_dtype != jax.numpy.float32:
        adamw = _kept_in(adamw, moment_dtype)
    return adamw if max_grad_norm is None else optax.chain(optax.clip_by_global_norm(max_grad_norm), adamw)


def _kept_in(optimizer: optax.GradientTransformation, dtype: jax.numpy.dtype) -> optax.GradientTransformation:
    """Returns the optimizer, computing in f32, with the arrays of its state kept in `dtype` between steps."""

    def cast(state, to):
        def cast_array(x):
            return x.astype(to) if jax.numpy.issubdtype(x.dtype, jax.numpy.floating) else x

        return jax.tree.map(cast_array, state)

    def update(gradients, state, params=None):
        updates, state = optimizer.update(gradients, cast(state, jax.numpy.float32), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(lambda params: cast(optimizer.init(params), dtype), update)


def decayed(params: PyTree) -> PyTree:
    """Returns True for each parameter with weight decay. Names decide, since stacking hides a parameter's own rank."""

    def is_decayed(path, _):
        names = (str(getattr(key, "key", getattr(key, "name", ""))) for key in path)
        return not any(name.endswith(NOT_DECAYED) for name in names)

    return jax.tree_util.tree_map_with_path(is_decayed, params)
