"""A dense matrix in FP8: y = x w^T with the experts' recipe, as one expert that has all tokens.

| product | first operand | second operand | result |
|---|---|---|---|
| y | x, by token | w | f32 sums, rounded to bf16 |
| dx | dy, by token | w transposed | f32 sums, rounded to bf16 |
| dw | dy in bf16 | x in bf16 | as without FP8 |

Cost: 2*T*N*K FLOPs per product. Rounding reads T*K and T*N bf16, and writes half the bytes. Sizes that are not multiples of 128
are zero-padded, which changes no sum. So the 576 rows of DeepSeek's kv_a_proj_with_mqa become 640. Its dy is copied into wider
rows.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float

from moe_jax.kernels.experts.fp8.backends import implementation, resolve_fp8_backend
from moe_jax.kernels.experts.fp8.quantise import GROUP, QuantisedMatrices, quantise_matrices, transposed
from moe_jax.kernels.shapes import refuse_explicit_axes, vary_alike


class DenseCopies(NamedTuple):
    """Precomputed FP8 copies of a matrix and its transpose; None: each pass computes them."""

    rounded: QuantisedMatrices | None = None
    """[out, in]; sizes may be padded to multiples of 128."""
    transposed: QuantisedMatrices | None = None


NO_COPIES = DenseCopies()


def fp8_matmul(
    x: BFloat16[Array, "*batch in"],
    w: Float[Array, "out in"],
    copies: DenseCopies = NO_COPIES,
    *,
    backend: str | None = None,
) -> BFloat16[Array, "*batch out"]:
    """Computes x w^T with both operands in FP8, also for dx; the gradient of w uses bf16 operands.

    Args:
        w: the matrix that gets the gradient. With copies its values are not read.
        copies: the matrix in FP8, without a gradient.
        backend: as in `experts_mlp`.

    Raises:
        ValueError: x is not bf16, or x, w and the copies differ in shape. The backend is unknown or does not support the input,
            or arrays are split over mesh axes of type Explicit.
    """
    if x.ndim == 0 or w.ndim != 2 or x.shape[-1] != w.shape[-1]:
        raise ValueError(f"x must be [..., in] and w [out, in]; got {list(x.shape)} and {list(w.shape)}")
    filled = tuple(map(_filled, w.shape))
    # The kernels support any multiple of 128 here. Limits on experts' sizes come from other kernels.
    matmuls = resolve_fp8_backend(backend, x.dtype, GROUP, GROUP).matmuls
    if copies.rounded is not None and tuple(copies.rounded.values.shape) not in (tuple(w.shape), filled):
        raise ValueError(f"copies must be of w, {list(w.shape)}; got {list(copies.rounded.values.shape)}")
    refuse_explicit_axes(x=x, w=w)
    return _matmul((matmuls, w.shape[0], w.dtype), *vary_alike((x, w, copies)))


def dense_copies(w: Float[Array, "*stack out in"], matmuls: str = "xla") -> DenseCopies:
    """Quantizes matrices and their transposes to FP8, without gradients; sizes are zero-padded to multiples of 128."""
    return DenseCopies(*implementation(matmuls).matrices_in_both_orders(_fill(lax.stop_gradient(w))))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(options: tuple[str, int, jnp.dtype], x: Array, w: Array, copies: DenseCopies) -> Array:
    """`options`: the backend, and w's first length and dtype."""
    matmuls, out, _ = options
    return _multiply(x, _rounded(w, copies), out, matmuls)


def _matmul_forward(options: tuple[str, int, jnp.dtype], x: Array, w: Array, copies: DenseCopies):
    # The backward pass rounds the matrix again if there are no copies: saving them would cost a byte per parameter.
    kept = w if copies.rounded is None else None
    return _matmul(options, x, w, copies), (x, kept, copies)


def _matmul_backward(options: tuple[str, int, jnp.dtype], residuals: tuple[Array, Array | None, DenseCopies], dy: Array):
    (x, w, copies), (matmuls, _, dtype) = residuals, options
    w_transposed = transposed(_rounded(w, copies)) if copies.transposed is None else copies.transposed
    dx = _multiply(dy, w_transposed, x.shape[-1], matmuls)
    leading = tuple(range(x.ndim - 1))
    # Leading axes are not merged: over one axis of all tokens XLA would sum in another order than without FP8.
    dw = lax.dot_general(dy, x, ((leading, leading), ((), ()))).astype(dtype)
    return dx, dw, None


_matmul.defvjp(_matmul_forward, _matmul_backward)


def _multiply(x: Array, w: QuantisedMatrices, out: int, matmuls: str) -> Array:
    """Computes the first `out` columns of x w^T, for tokens along any axes."""
    tokens = x.reshape(-1, x.shape[-1])
    tokens = jnp.pad(tokens, ((0, 0), (0, w.values.shape[-1] - x.shape[-1])))
    return implementation(matmuls).matmul_of_tokens(tokens, w)[:, :out].reshape(*x.shape[:-1], out)


def _rounded(w: Array | None, copies: DenseCopies) -> QuantisedMatrices:
    if copies.rounded is not None:
        # Scales of cut-off blocks already exist.
        return QuantisedMatrices(_fill(copies.rounded.values), copies.rounded.scales)
    assert w is not None
    return quantise_matrices(_fill(w))


def _fill(w: Array) -> Array:
    """Fills matrices with zeros up to multiples of 128."""
    return jnp.pad(w, [(0, 0)] * (w.ndim - 2) + [(0, _filled(size) - size) for size in w.shape[-2:]])


def _filled(size: int) -> int:
    return -(-size // GROUP) * GROUP
