"""The sparse feed-forward block: a router, experts (each token uses k), and experts that all tokens share."""

import functools
import math
import operator
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Integer

from moe_jax.config import RouterRule
from moe_jax.kernels.experts.activation import SILU, Activation
from moe_jax.kernels.experts.call import TokenPart
from moe_jax.kernels.experts.call import experts as compute_experts
from moe_jax.kernels.experts.deferred import expert_products_like
from moe_jax.kernels.experts.fp8.backends import resolve_fp8_backend
from moe_jax.kernels.experts.fp8.dense import dense_copies
from moe_jax.kernels.experts.fp8.passes import quantise_experts
from moe_jax.kernels.experts.fp8.precision import Precision
from moe_jax.kernels.experts.fp8.quantise import GROUP, InFp8
from moe_jax.kernels.experts.weights import Accumulators, ExpertProducts, ExpertWeights, Matrix
from moe_jax.layers.balance import Sequences
from moe_jax.layers.fp8 import codes_of
from moe_jax.layers.linear import DeferredWeight, Fp8Copies, Linear, RMSNorm, TicketHolder, normal_parameter
from moe_jax.layers.lora import Adapter, Frozen
from moe_jax.layers.matrices import check_declared, declared
from moe_jax.layers.mlp import MLP
from moe_jax.layers.quantised import Quantised, is_quantised, of_stack
from moe_jax.layers.router import Router, Routing
from moe_jax.layers.spread import ONE_DEVICE, OneDevice

EXPERT_CHUNK_TOKENS = 65536
"""Above twice this number of tokens, experts compute in chunks of this size, at the same speed and in bounded memory."""


EXPERT_MATRICES = ("gate_up_proj", "down_proj")
"""The names of the experts' matrices, in the order of `Matrices`."""


def is_expert_matrix(path: tuple) -> bool:
    """Returns True if `path` (names of modules and parameter) leads to an expert matrix."""
    return path[-2:-1] == ("experts",) and path[-1] in EXPERT_MATRICES


class MoE(nnx.Module):
    """y[t] = sum_k weights[t, k] * down_e(activation(gate_e x[t], up_e x[t])) with e = experts[t, k]. No token is dropped.

    Args:
      norm_topk_prob: divide the chosen experts' weights by their sum; read only without `rule`.
      rule: how the router chooses experts and weights; default: the k largest of a softmax.
      shared_intermediate_size: intermediate size of all shared experts together; 0: none. They are one dense block whose
        output is added.
      shared_gate: multiply the shared experts' output by the sigmoid of a learned score of each token.
      output_norm: a norm of the sum of all experts.
      biases: add a bias to the products of each matrix of the routed experts.
      activation: the activation of all experts, including shared ones.
      precision: `kernels.Precision()` multiplies the experts in FP8, and with `dense` the shared experts too; None: in x's
        dtype.

    Usable by itself in any Flax NNX model:

        moe = MoE(512, 256, num_experts=16, num_experts_per_tok=4, rngs=nnx.Rngs(0))
        y, routing = moe(x)                                   # x [..., 512], as [batch, seq, 512]
        loss = task_loss(y) + 0.01 * load_balancing_loss(routing)

    examples/moe_block.py and, over several devices, examples/moe_block_sharded.py are whole programs.
    """

    flattens_tokens = True
    """The modules inside expect tokens along one axis; `layers.tickets` reads this."""

    def __init__(
        self,
        hidden_size: int,
        moe_intermediate_size: int,
        num_experts: int,
        num_experts_per_tok: int,
        *,
        norm_topk_prob: bool = True,
        rule: RouterRule | None = None,
        shared_intermediate_size: int = 0,
        shared_gate: bool = False,
        output_norm: RMSNorm | None = None,
        biases: bool = False,
        activation: Activation = SILU,
        precision: Precision | None = None,
        stddev: float = 0.02,
        stack: tuple[int, ...] = (),
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        options: dict[str, Any] = dict(stddev=stddev, stack=stack, param_dtype=param_dtype, rngs=rngs)
        rule = RouterRule(norm_topk_prob=norm_topk_prob) if rule is None else rule
        self.router = Router(hidden_size, num_experts, num_experts_per_tok, rule, **options)
        self.shared_expert_gate = Linear(hidden_size, 1, **options) if shared_gate else None
        self.output_norm = output_norm
        options["activation"] = activation
        self.experts = Experts(
            hidden_size, moe_intermediate_size, num_experts, num_experts_per_tok=num_experts_per_tok, biases=biases, **options
        )
        self.shared_experts = MLP(hidden_size, shared_intermediate_size, **options) if shared_intermediate_size else None
        set_precision(self, precision)

    def __call__(
        self,
        x: Float[Array, "*batch hidden"],
        valid: Bool[Array, "*batch"] | Bool[Array, "tokens"] | Sequences | None = None,
        *,
        expert_ids: Integer[Array, "*batch k"] | Integer[Array, "tokens k"] | Literal["balanced"] | None = None,
        spread: OneDevice = ONE_DEVICE,
    ) -> tuple[Float[Array, "*batch hidden"], Routing]:
        """Returns y in x's dtype, and the routing with x's tokens along one axis.

        With `spread.expert` call it inside a `jax.shard_map` over its axis. x holds this device's tokens, the router is whole,
        and `experts` holds this device's part of the experts. The routing's sums are over this device's tokens. There, tokens
        that are not valid use no experts, which leaves room for others: their y is only the shared experts'.

        Args:
          x: the tokens.
          valid: tokens that count in the routing's sums, with x's leading axes or with one axis of all tokens; all if None.
            `Sequences` also defines the tokens' documents, for the sequence-wise loss.
          expert_ids: as in `Router`; ids have x's leading axes or one axis of all tokens, like `routing.experts`.
          spread: a `parallel.Spread`; only its `expert` is read: how tokens travel to other devices' experts.

        Raises:
          ValueError: x's last axis is not the block's hidden size; or `valid` or `expert_ids` does not fit x. The devices of
            the axis together do not hold the router's number of experts.
          NameError: with `spread.expert`, outside `shard_map` or in one whose mesh lacks the axis.
        """
        hidden = self.experts.gate_up_proj.shape[-1]
        if x.ndim == 0 or x.shape[-1] != hidden:
            raise ValueError(f"x must have shape [..., hidden] with hidden={hidden}; got {list(x.shape)}")
        leading, x = x.shape[:-1], x.reshape(-1, hidden)
        if valid is not None and not isinstance(valid, Sequences):
            valid = _one_axis_of_tokens("valid", valid, leading, ()) != 0
        if expert_ids is not None and not isinstance(expert_ids, str):
            expert_ids = _one_axis_of_tokens("expert_ids", expert_ids, leading, (self.router.num_experts_per_tok,))
        routing = self.router(x, valid, expert_ids=expert_ids)
        y, exchange = spread.experts(self.experts, x, routing, valid)
        if exchange is not None:
            routing = routing._replace(sums=routing.sums.with_exchange(exchange))
        if self.shared_experts is not None:
            shared = self.shared_experts(x)
            y = y + (shared if self.shared_expert_gate is None else jax.nn.sigmoid(self.shared_expert_gate(x)) * shared)
        if self.output_norm is not None:
            y = self.output_norm(y)
        return y.reshape(*leading, hidden), routing


def _one_axis_of_tokens(name: str, array: Array, leading: tuple[int, ...], own_axes: tuple[int, ...]) -> Array:
    """Merges the axes `leading` (x's leading axes) of the array into one axis of tokens."""
    tokens = (math.prod(leading),)
    if array.shape not in (leading + own_axes, tokens + own_axes):
        raise ValueError(f"{name} must have shape {[*leading, *own_axes]} for this x; got {list(array.shape)}")
    return array.reshape(tokens + own_axes)


class GradientAccumulator(nnx.Variable):
    """f32 gradient sums of both expert matrices. The "gradient" of this variable is the updated sums."""


class StackedWeight(nnx.Variable):
    """A `DeferredWeight` that holds all stacked layers, so kernels index one layer without slicing a copy."""


class PlaceInStack(nnx.Variable):
    """The index of a layer in its stack, for kernels that read the layer's weights from the whole stack."""


def add_expert_gradients_to(model: nnx.Module, accumulators: nnx.State, *, in_stacks: bool = False) -> None:
    """Makes the backward pass add expert gradients to `accumulators`, which are structured like the model's parameters.

    The model must be merged for a single call, inside the function that is differentiated in `accumulators`.
    """
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Experts):
            own: Any = functools.reduce(operator.getitem, path, accumulators)
            module.add_gradients_to(own["gate_up_proj"][...], own["down_proj"][...], in_stacks=in_stacks)


def accumulated_gradients(accumulators: nnx.State) -> nnx.State:
    """Returns the arrays of all `GradientAccumulator`s under their weights' paths; inverts `add_expert_gradients_to`."""
    found = []
    for (*path, _), variable in nnx.to_flat_state(accumulators):
        sums = variable.get_value()
        found += [((*path, "gate_up_proj"), nnx.Param(sums.gate_up)), ((*path, "down_proj"), nnx.Param(sums.down))]
    return nnx.from_flat_state(found)


def set_precision(model: nnx.Module, precision: Precision | None) -> None:
    """Sets the matmul precision of all experts and dense matrices of a model.

    Raises:
      ValueError: with dense groups, a matrix whose group is unknown (`layers.matrices`).
    """
    dense = () if precision is None else precision.dense
    if dense:
        check_declared(nnx.to_flat_state(nnx.state(model, (nnx.Param, Frozen))))
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Experts):
            module.precision = precision
        elif isinstance(module, Linear):
            matrix = declared(path)
            module.in_fp8 = matrix is not None and matrix.role in dense


def precision_of(model: nnx.Module) -> Precision | None:
    """Returns the precision of the model's first MoE layer; None without experts."""
    return next((module.precision for _, module in nnx.iter_modules(model) if isinstance(module, Experts)), None)


def keep_experts(model: nnx.Module) -> None:
    """Sets `ExpertWeights.keeps_residuals` of all experts of a model."""
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Experts):
            module.keeps_residuals = True


def fp8_copies(model: nnx.Module, *, on_one_device: bool = False) -> nnx.State:
    """Returns FP8 copies, also transposed, of all matrices that multiply in FP8.

    Frozen experts and quantised dense matrices need none. With `on_one_device`, or inside `jax.shard_map`, kernels round them;
    XLA cannot split a kernel over devices.
    """
    multiplying = [
        (path, module)
        for path, module in nnx.iter_modules(model)
        if (isinstance(module, Experts) and module.precision is not None and not isinstance(module.gate_up_proj, Frozen))
        or (isinstance(module, Linear) and module.in_fp8 and not is_quantised(module.weight.get_value()))
    ]
    matmuls, found = "xla", {}
    if multiplying and on_one_device:
        # Imports the kernels' modules, which a model without FP8 does not need.
        matmuls = resolve_fp8_backend(None, jnp.dtype(jnp.bfloat16), GROUP, GROUP).matmuls
    for path, module in multiplying:
        if isinstance(module, Experts):
            copies: Any = quantise_experts(module.gate_up_proj[...], module.down_proj[...], matmuls)
        else:
            copies = dense_copies(module.weight[...], matmuls)
        found[(*path, "fp8_copies")] = Fp8Copies(copies)
    return nnx.from_flat_state(found.items())


def hold_fp8_copies(model: nnx.Module, copies: nnx.State) -> None:
    """Stores FP8 copies from `fp8_copies` in the modules, so that passes do not quantize again."""
    for (*path, _), variable in nnx.to_flat_state(copies):
        module: Any = functools.reduce(_member, path, model)
        module.fp8_copies = Fp8Copies(variable.get_value())


def _member(module: Any, name: Any) -> Any:
    return module[name] if isinstance(name, int) else getattr(module, name)


class Experts(TicketHolder):
    """The experts' weights, fused as in transformers: gate_up_proj [E, 2I, D] (gate rows first) and down_proj [E, D, I].

    Args:
      num_experts_per_tok: choices of a token, only for the size of tickets (`layers.tickets`); a call accepts any number.
      biases: add gate_up_proj_bias [E, 2I] and down_proj_bias [E, D] to the products; they start at zero.
    """

    matrices = EXPERT_MATRICES
    gate_up_lora: Adapter | None = None
    down_lora: Adapter | None = None
    accumulators: GradientAccumulator | None = None
    place: PlaceInStack | None = None
    fp8_copies: Fp8Copies | None = None
    precision: Precision | None
    """The operands of the matmuls; None: x's dtype."""
    keeps_residuals = False
    """True if an enclosing `jax.checkpoint` keeps the experts' residuals (`ExpertWeights.keeps_residuals`)."""

    def __init__(
        self,
        hidden_size: int,
        moe_intermediate_size: int,
        num_experts: int,
        *,
        num_experts_per_tok: int | None = None,
        biases: bool = False,
        activation: Activation = SILU,
        stddev: float = 0.02,
        stack: tuple[int, ...] = (),
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        gate_up_shape = (*stack, num_experts, 2 * moe_intermediate_size, hidden_size)
        down_shape = (*stack, num_experts, hidden_size, moe_intermediate_size)
        self.gate_up_proj: nnx.Variable = normal_parameter(gate_up_shape, stddev, param_dtype, rngs)
        self.down_proj: nnx.Variable = normal_parameter(down_shape, stddev, param_dtype, rngs)
        of_both = [nnx.Param(jnp.zeros(shape[:-1], param_dtype)) if biases else None for shape in (gate_up_shape, down_shape)]
        self.gate_up_proj_bias, self.down_proj_bias = of_both
        self.num_experts_per_tok, self.activation = num_experts_per_tok, activation
        # Each instance has it from the start: a model whose choice was taken back is equal to one without a choice.
        self.precision = None

    def __call__(
        self, x: Float[Array, "tokens hidden"], weights: Float[Array, "tokens k"], experts: Int[Array, "tokens k"]
    ) -> Float[Array, "tokens hidden"]:
        """Returns the weighted sum of the chosen experts' outputs (`kernels.experts_mlp`)."""
        many = len(x) > 2 * EXPERT_CHUNK_TOKENS and self.ticket is None
        options: dict[str, Any] = dict(chunk_tokens=EXPERT_CHUNK_TOKENS if many else None, precision=self.precision)
        parts = [TokenPart(x, weights, experts)]
        (y,) = compute_experts(parts, self.operands, activation=self.activation, **options)
        return y

    @property
    def operands(self) -> ExpertWeights:
        """Both matrices as kernel operands. If read from a whole stack, they are frozen except for accumulators."""
        values, layer = (self.gate_up_proj.get_value(), self.down_proj.get_value()), None
        if self.place is not None:
            layer = self.place[...]
        codes = [None if self.precision is None else codes_of(value) for value in values]
        if all(codes):
            matrices = [Matrix(None, InFp8(each)) for each in codes if each is not None]
        else:
            if any(isinstance(value, Quantised) for value in values):
                # Only one layer's codes are dequantised, not the whole stack's.
                whole = [value if layer is None else of_stack(value, layer) for value in values]
                values, layer = (whole[0][...], whole[1][...]), None
            matrices = list(map(Matrix.of, values))
        if self.fp8_copies is not None:
            copies = self.fp8_copies.get_value()
            matrices = [replace(matrix, in_fp8=each) for matrix, each in zip(matrices, copies, strict=True)]
        adapters = self.gate_up_lora, self.down_lora
        changes = [None if lora is None else lora.factors for lora in adapters]
        biases = [None if bias is None else bias[...] for bias in (self.gate_up_proj_bias, self.down_proj_bias)]
        each = zip(matrices, changes, biases, strict=True)
        gate_up, down = (replace(matrix, change=change, bias=bias) for matrix, change, bias in each)
        into = self.ticket if self.accumulators is None else self.accumulators
        gradient = None if into is None else into.get_value()
        is_frozen = isinstance(self.gate_up_proj, Frozen) or (self.place is not None and gradient is None)
        return ExpertWeights(gate_up, down, layer, gradient, is_frozen, self.keeps_residuals)

    def products_like(self, x: Float[Array, "tokens hidden"], max_pairs: int | None = None) -> ExpertProducts:
        """Returns arrays like the operands of both matrices' gradients (`expert_products_like`).

        Raises:
          ValueError: the module was built without `num_experts_per_tok`.
        """
        if self.num_experts_per_tok is None:
            raise ValueError("the experts' ticket needs num_experts_per_tok; give it to Experts")
        *_, num_experts, _, inter = self.down_proj.shape
        options: Any = dict(precision=self.precision, max_pairs=max_pairs)
        return expert_products_like(x, num_experts, self.num_experts_per_tok, inter, **options)

    def add_gradients_to(self, gate_up: Array, down: Array, *, in_stacks: bool = False) -> None:
        """Makes later backward passes add gradients to these f32 arrays of the weights' shapes, not return them.

        Args:
          in_stacks: the module is a stack of layers that run one by one. Each gets the whole stacks, and its index in them.
        """
        weight = StackedWeight if in_stacks else DeferredWeight
        if in_stacks:
            self.place = PlaceInStack(jnp.arange(len(gate_up), dtype=jnp.int32))
        self.gate_up_proj, self.down_proj = weight(self.gate_up_proj[...]), weight(self.down_proj[...])
        self.accumulators = GradientAccumulator(Accumulators(gate_up, down, in_stack=True))

    def read_in_stack(self, layer: Int[Array, ""]) -> None:
        """Makes later calls read layer `layer` from stacked weights in place, without gradients."""
        self.place = PlaceInStack(layer)
