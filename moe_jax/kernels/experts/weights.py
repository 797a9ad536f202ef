"""The weights of experts as operands: their values, FP8 copies, low-rank changes, and the destination of their gradients."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from moe_jax.kernels.experts.fp8.quantise import InFp8, QuantisedMatrices
from moe_jax.kernels.low_rank import LowRank


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Matrix:
    """One matrix per expert, as values or FP8 codes. FSDP also stores one in place of a parameter gathered in FP8."""

    values: Float[Array, "*layers experts out in"] | None
    """The array that gets the gradient. None: the matrix exists only in FP8, and is frozen."""
    in_fp8: InFp8 | None = None
    """Precomputed FP8 copies, which multiply instead of the values. None: each pass computes them."""
    change: LowRank | None = None
    """A trained change of the frozen matrix, of one layer. A factor with one expert is shared by all."""
    bias: Float[Array, "experts out"] | None = None
    """The bias of one layer's experts, also if the values are a whole stack. Frozen matrices have frozen biases."""

    @classmethod
    def of(cls, w: "Float[Array, '*layers experts out in'] | QuantisedMatrices | Matrix") -> "Matrix":
        """Wraps an array or `QuantisedMatrices` as an operand; returns a `Matrix` unchanged."""
        if isinstance(w, Matrix):
            return w
        return cls(None, InFp8(w)) if isinstance(w, QuantisedMatrices) else cls(w)

    @property
    def whole(self) -> Float[Array, "*layers experts out in"]:
        """An array with the matrix's shape: its values, or else its FP8 codes."""
        if self.values is not None:
            return self.values
        assert self.in_fp8 is not None
        return self.in_fp8.rounded.values

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        return self.whole.shape

    def __getitem__(self, key: Any) -> "Matrix":
        """Returns the matrix for weight[...], as modules read a parameter.

        Raises:
            IndexError: another index.
        """
        if key is not Ellipsis:
            raise IndexError(f"weights that are rounded are read as a whole, weight[...]; got index {key!r}")
        return self


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Accumulators:
    """Weight-gradient sums of earlier micro-batches, in f32 (f64 for f64), which kernels add to."""

    gate_up: Float[Array, "*layers experts 2*inter hidden"]
    down: Float[Array, "*layers experts hidden inter"]
    in_stack: bool = field(metadata={"static": True}, default=False)
    """True if both are slices of stacked arrays, and `lax.dynamic_update_slice` writes their gradients back to the same place.

    `layers.passes` does so, and the kernels then work inside the stack. Other slices must be copied first: XLA would let a
    kernel change the slice in place and read the result from elsewhere.
    """


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertProducts:
    """The operands of deferred weight gradients, multiplied later by `deferred.add_expert_products`."""

    dh: Float[Array, "rows 2*inter"]
    x: Float[Array, "tokens hidden"]
    dy: Float[Array, "tokens hidden"]
    weighted_act: Float[Array, "rows inter"]
    experts: Float[Array, "tokens k"]
    """The chosen ids, from which the plan is rebuilt; -1: no expert. In f32, because gradients are floats; exact below 2^24."""
    row_alignment: int = field(metadata={"static": True}, default=1)
    max_pairs: int | None = field(metadata={"static": True}, default=None)
    """Both are the plan's."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertWeights:
    """Both matrices of each expert, with biases, LoRA updates and gradient targets: the weights of `call.experts`."""

    gate_up: Matrix
    """[experts, 2*inter, hidden], the gate's rows before the up rows."""
    down: Matrix
    """[experts, hidden, inter]."""
    layer: Int[Array, ""] | None = None
    """If given, matrices and accumulators are whole stacks [layers, experts, ...], and a call uses this layer. The kernels then
    read and write inside the stacks for any index. XLA copies slices at an index other than a loop counter: for the experts of
    Qwen3-30B-A3B 14 GB per layer and micro-batch.
    """
    gradient: Accumulators | ExpertProducts | None = None
    """The destination of the matrices' gradients. None: they are the gradients of `values`.

    y does not depend on it, and `values` then have no gradient (zero). The gradient of `Accumulators` is the new sum,
    accumulators + the weight gradients of this call, unrounded. The gradient of `ExpertProducts` (a ticket, whose values are
    not read) is the operands of the weight gradients. The gradient of y must reach either through a single call: two calls
    would add both. A `vmap` over tokens counts as several calls. So does `shard_map`: there each device has its own
    accumulators, to be summed over devices at the end.
    """
    frozen: bool = field(metadata={"static": True}, default=False)
    """The matrices have no gradients, and no products are computed for them; changes do have gradients."""
    keeps_residuals: bool = field(metadata={"static": True}, default=False)
    """An enclosing `jax.checkpoint` keeps arrays named "experts": h and the plan. False: it keeps neither."""

    @classmethod
    def of(cls, w_gate_up: Any, w_down: Any, biases: tuple[Array, Array] | None = None, **others: Any) -> "ExpertWeights":
        """Wraps two arrays, or two `QuantisedMatrices`, as expert weights."""
        made = cls(Matrix.of(w_gate_up), Matrix.of(w_down), **others)
        if biases is None:
            return made
        return replace(made, gate_up=replace(made.gate_up, bias=biases[0]), down=replace(made.down, bias=biases[1]))

    @property
    def num_experts(self) -> int:
        """The number of experts of a layer."""
        return self.down.shape[-3]

    @property
    def own_gradients(self) -> bool:
        """True if `values` receive gradients, rather than accumulators, tickets or LoRA factors."""
        return not self.frozen and self.gradient is None and self.down.values is not None

    def with_each(self, function: Callable[[Matrix], Matrix], **others: Any) -> "ExpertWeights":
        """Returns a copy with each matrix replaced by function(matrix), and with other fields set."""
        return replace(self, gate_up=function(self.gate_up), down=function(self.down), **others)

    def trained(self) -> "ExpertWeights":
        """Returns only the differentiated arrays (values, accumulators, LoRA factors, biases); other fields are None."""
        own, frozen = self.own_gradients, self.frozen

        def of_matrix(matrix: Matrix) -> Matrix:
            return Matrix(matrix.values if own else None, None, matrix.change, None if frozen else matrix.bias)

        return self.with_each(of_matrix, layer=None)

    def held(self) -> "ExpertWeights":
        """Returns only the arrays that are not differentiated: the complement of `trained`."""
        own, frozen = self.own_gradients, self.frozen

        def of_matrix(matrix: Matrix) -> Matrix:
            values, bias = None if own else matrix.values, matrix.bias if frozen else None
            return replace(matrix, values=values, bias=bias, change=None)

        return self.with_each(of_matrix, gradient=None)

    def with_trained(self, trained: "ExpertWeights") -> "ExpertWeights":
        """Combines `held` arrays (self) with `trained` ones into complete weights."""

        def joined(held: Matrix, own: Matrix) -> Matrix:
            values, bias = (a if b is None else b for a, b in ((held.values, own.values), (held.bias, own.bias)))
            return replace(held, values=values, bias=bias, change=own.change)

        matrices = joined(self.gate_up, trained.gate_up), joined(self.down, trained.down)
        return replace(self, gate_up=matrices[0], down=matrices[1], gradient=trained.gradient)
