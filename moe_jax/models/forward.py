"""One pass through a model's layers: the inputs that all read, the state between layers, a layer, and the loop over a stage."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Integer

from moe_jax.config import ModelConfig
from moe_jax.layers.attend import Attend
from moe_jax.layers.balance import Sequences
from moe_jax.layers.cache import KVCache
from moe_jax.layers.fp8 import Fp8Copies
from moe_jax.layers.linear import DeferredWeight, RMSNorm, WeightTicket
from moe_jax.layers.lora import DropoutKey, Frozen
from moe_jax.layers.moe import GradientAccumulator, PlaceInStack, StackedWeight, keep_experts
from moe_jax.layers.paged import LayerPages, PagedAttend
from moe_jax.layers.passes import WHOLE_LAYER, LayerArrays, Layers, run_layers
from moe_jax.layers.rope import RopeTables, rope_tables
from moe_jax.layers.router import ExpertBias, Routing
from moe_jax.layers.router_sums import RouterSums
from moe_jax.layers.segments import runs, segment_positions
from moe_jax.models.execution import Execution
from moe_jax.models.output import HiddenStates
from moe_jax.parallel.sequence.attention import ContextParallel
from moe_jax.parallel.spread import Spread


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerInputs:
    """Inputs that all layers of one call share, such as positions and masks; built once by `layer_inputs`.

    Attributes:
      rope: cos and sin of the tokens' positions.
      segments: ids of the tokens' segments, in the form that `Attend` reads.
      valid: tokens that count in the router's sums.
      sequences: the documents of the valid tokens, for the sequence-wise balance loss; None leaves that loss out.
      expert_ids: the experts of one layer's tokens: ids to replay, "balanced" (dealt out in turn), or None (the router's
        choice).
    """

    rope: RopeTables
    segments: Int[Array, "batch seq"]
    valid: Bool[Array, "batch seq"]
    sequences: Sequences | None = None
    expert_ids: Integer[Array, "batch seq k"] | Literal["balanced"] | None = None

    @property
    def counted(self) -> Bool[Array, "tokens"] | Sequences:
        """The flattened mask of tokens that count in router statistics, or `sequences` if documents are known."""
        return self.valid.reshape(-1) if self.sequences is None else self.sequences

    def counted_where(self, exists: Bool[Array, ""]) -> "LayerInputs":
        """Returns inputs in which no token is valid if `exists` is False, so none is sent to other devices' experts."""
        sequences = self.sequences
        if sequences is not None:
            sequences = replace(sequences, length=jnp.where(exists, sequences.length, 0))
        return replace(self, valid=self.valid & exists, sequences=sequences)


class PerLayer(NamedTuple):
    """Inputs that differ between layers, stacked along a leading axis of a stage's layers.

    If the stage's body is a pattern, axes of repeats and places replace it, [repeats, places, ...]; `exists` is [repeats].
    """

    layer: Int[Array, "layers"]
    """The layer's row in the cache (`layers.cache.cache_rows`)."""
    window: Int[Array, "layers"] | None = None
    """The layer's sliding window."""
    expert_ids: Integer[Array, "layers batch seq k"] | None = None
    """The experts to replay."""
    exists: Bool[Array, "layers"] | None = None
    """False for a layer whose results are discarded: padding of a pipeline's last chunk, or a tick without a micro-batch."""


class Carry(NamedTuple):
    """The loop carry from one layer to the next: the residual stream and the cache."""

    x: Any
    """The residual stream [batch, seq, hidden], or the `PredictorState` of a `mtp.TokenPredictor`."""
    cache: KVCache | None


class LayerOutput(NamedTuple):
    """One layer's result: the new carry and the layer's routing."""

    x: Any
    """The residual stream after the layer, as in `Carry`."""
    cache: KVCache | LayerPages | None
    """The cache, or the layer's pages, with this layer's keys and values of the tokens; None without either."""
    routing: Routing | None
    """None for a dense layer."""


class Entered(NamedTuple):
    """The result of `Decoder.enter`: the embedded tokens and the inputs that all layers share."""

    inputs: LayerInputs
    per_layer: list[PerLayer]
    """One for each stage of `config.stages`."""
    carry: Carry


def layer_inputs(
    config: ModelConfig,
    positions: Int[Array, "batch seq"] | None,
    segment_ids: Integer[Array, "batch seq"],
    valid: Bool[Array, "batch seq"],
    *,
    cache: KVCache | None = None,
    context: ContextParallel | None = None,
    sequence_balance: bool = False,
) -> LayerInputs:
    """Builds the inputs that all layers share (rotary tables, segments, masks) from a call's arguments.

    Args:
      positions: for the rotary embedding; None: each token's index in its segment.
      cache, context, sequence_balance: as in `Decoder.hidden_states`; `context` is `Spread.context`.

    Raises:
      ValueError: both a cache and `context`; or `context` and recurrent layers.
    """
    if context is not None and (reason := config.mixer_refusal("attention over devices", has_sinks=False)) is not None:
        raise ValueError(reason)
    if cache is not None and context is not None:
        raise ValueError("cache and spread.context cannot be given together: cached tokens are not split over devices")
    segments = segment_ids
    if context is not None:
        segments = context.starts_of_segments(segment_ids)
    elif cache is None:
        segments = runs(segment_ids)
    if positions is None:
        positions = segment_positions(segment_ids) if context is None else context.positions(segments)
    return LayerInputs(
        rope_tables(positions, config.rope_parameters, config.mixer.rotary_dim, config.max_position_embeddings),
        segments,
        valid,
        Sequences.of(jnp.where(valid, segment_ids, 0), context) if sequence_balance else None,
    )


class StageRouting(NamedTuple):
    """The routings of a stage's layers, stacked as in `PerLayer`; fields as in `Routing`."""

    sums: RouterSums
    experts: Int[Array, "layers tokens k"]

    def in_order(self, arrays: Any) -> Any:
        """Merges the axes of repeats and places in arrays stacked like these, into one axis of layers."""
        return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), arrays) if self.experts.ndim == 4 else arrays


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with a dense mlp."""

    def __init__(
        self,
        config: ModelConfig,
        mlp: nnx.Module,
        attention: nnx.Module,
        *,
        stack: tuple[int, ...] = (),
        param_dtype: DTypeLike = jnp.float32,
    ):
        norm = partial(RMSNorm, config.hidden_size, eps=config.rms_norm_eps, stack=stack, param_dtype=param_dtype)
        self.input_layernorm = norm()
        self.self_attn = attention
        self.post_attention_layernorm = norm()
        self.mlp = mlp

    def __call__(
        self, x: Float[Array, "batch seq hidden"], inputs: LayerInputs, attend: Attend | PagedAttend, spread: Spread
    ) -> LayerOutput:
        """Applies the layer to the residual stream; `attend` is this layer's attention."""
        attended, cache = self.self_attn(self.input_layernorm(x), inputs.rope, attend)
        x = x + attended
        out, routing = self.feed_forward(self.post_attention_layernorm(x), inputs, spread)
        return LayerOutput(x + out, cache, routing)

    def feed_forward(
        self, x: Float[Array, "batch seq hidden"], inputs: LayerInputs, spread: Spread
    ) -> tuple[Float[Array, "batch seq hidden"], Routing | None]:
        """Returns mlp(x) for normalized x; the caller adds it to the residual stream."""
        return self.mlp(x), None


class SparseDecoderLayer(DecoderLayer):
    """A decoder layer whose feed-forward block is a mixture of experts (`layers.moe.MoE`)."""

    def feed_forward(
        self, x: Float[Array, "batch seq hidden"], inputs: LayerInputs, spread: Spread
    ) -> tuple[Float[Array, "batch seq hidden"], Routing]:
        """Returns moe(x) for normalized x, with the tokens of all sequences routed together."""
        return self.mlp(x, inputs.counted, expert_ids=inputs.expert_ids, spread=spread)


class LayerPattern(nnx.Module):
    """The repeating body of a stage: consecutive layers of different kinds, each stacked over the repeats."""

    def __init__(self, places: Sequence[nnx.Module]):
        self.places = nnx.List(places)


class StageLayers(NamedTuple):
    """The loop body over a stage's layers and the arrays that it reads, as `layers.passes` expects them."""

    layers: Layers
    arrays: LayerArrays


def run_stage(
    stage: nnx.Module, number: int, inputs: LayerInputs, per_layer: PerLayer, carry: Carry, execution: Execution
) -> tuple[Carry, StageRouting | None]:
    """Runs all layers of one stage on the carry, in order.

    Arguments as in `stage_layers`, plus the carry before the first layer.

    Returns:
      The carry after the last layer, and the routings of all layers; None for dense layers.
    """
    return run_layers(*stage_layers(stage, number, inputs, per_layer, execution), carry)


def stage_layers(stage: nnx.Module, number: int, inputs: LayerInputs, per_layer: PerLayer, execution: Execution) -> StageLayers:
    """Returns the loop body of a stage's layers and the arrays that the loop reads; the carry is a `Carry`.

    Args:
      stage: the stacked layers, with `DecoderLayer`'s call signature, or a `LayerPattern` of them.
      number: the stage's index in `Decoder.stages`, and so in `Spread.layer_gathers`.
    """
    spread = execution.spread
    gather = spread.gather(number)
    accumulating = GradientAccumulator, WeightTicket
    without_gradients = ExpertBias, Frozen, DeferredWeight, Fp8Copies
    graph, *states = nnx.split(stage, nnx.Param, accumulating, (*without_gradients, StackedWeight, PlaceInStack, DropoutKey))
    parameters, accumulators, others = states
    stacks, others = nnx.split_state(others, StackedWeight, ...)
    frozen = None
    if gather is not None and gather.num_frozen:
        frozen, others = nnx.split_state(others, Frozen, ...)
        if not jax.tree.leaves(parameters):
            gather = gather.of_frozen
    elif gather is not None:
        # Matrices whose gradients go elsewhere are whole on each device, and no parameters.
        matrices = nnx.to_flat_state(nnx.state(stage, (nnx.Param, DeferredWeight, StackedWeight)))
        gather = gather.without([not isinstance(matrix, nnx.Param) for _, matrix in matrices])

    def layer(shared: tuple[LayerInputs, nnx.State], own: tuple, carry: Carry, parameters, accumulators):
        (inputs, stacks), (*of_frozen, per_layer, others) = shared, own
        block = nnx.merge(graph, parameters, accumulators, stacks, others, *of_frozen)
        if "experts" in execution.keep:
            keep_experts(block)
        if per_layer.exists is not None:
            inputs = inputs.counted_where(per_layer.exists)
        if not isinstance(block, LayerPattern):
            return one(block, inputs, per_layer, carry)
        routings = []
        for place, of_place in enumerate(block.places):
            own_inputs = jax.tree.map(lambda a, place=place: a[place], per_layer._replace(exists=None))
            carry, routing = one(of_place, inputs, own_inputs, carry)
            routings.append(routing)
        return carry, jax.tree.map(lambda *of_places: jnp.stack(of_places), *routings)

    def one(block: Any, inputs: LayerInputs, per_layer: PerLayer, carry: Carry) -> tuple[Carry, StageRouting | None]:
        is_kept = "attention" in execution.keep
        attend = Attend(inputs.segments, per_layer.layer, per_layer.window, carry.cache, spread.context, is_kept=is_kept)
        inputs = replace(inputs, expert_ids="balanced" if execution.balanced_routing else per_layer.expert_ids)
        out = block(carry.x, inputs, attend, spread)
        return Carry(out.x, out.cache), None if out.routing is None else StageRouting(out.routing.sums, out.routing.experts)

    whole_accumulators = bool(jax.tree.leaves(stacks))
    layers = Layers(layer, gather or WHOLE_LAYER, execution.remat, execution.num_kept, execution.keep, whole_accumulators)
    return StageLayers(layers, LayerArrays((inputs, stacks), (per_layer, others), parameters, accumulators, frozen))


def collect(
    hidden: Float[Array, "batch seq hidden"], routings: list[StageRouting], inputs: LayerInputs, cache: KVCache | None
) -> HiddenStates:
    """Builds the `HiddenStates` of a call: concatenates the routings of all MoE layers and advances the cache."""
    batch, seq, _ = hidden.shape
    if routings:
        routings = [routing.in_order(routing) for routing in routings]
        sums = RouterSums.concatenate([routing.sums for routing in routings])
        experts = jnp.concatenate([routing.experts for routing in routings])
    else:
        sums, experts = RouterSums.of_no_layer(batch * seq), jnp.zeros((0, batch * seq, 0), jnp.int32)
    sums = sums.with_counts(inputs.valid, inputs.sequences)
    expert_ids = experts.reshape(len(experts), batch, seq, experts.shape[-1])
    return HiddenStates(hidden, sums, expert_ids, None if cache is None else cache.advanced(seq))
