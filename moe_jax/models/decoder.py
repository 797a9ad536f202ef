"""The frame of every architecture here: embedding, stages of decoder layers, norm and vocabulary projection."""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from moe_jax.config import ModelConfig, Stage
from moe_jax.kernels.varying import vary_as
from moe_jax.layers.attend import Attend
from moe_jax.layers.balance import Sequences
from moe_jax.layers.cache import KVCache
from moe_jax.layers.linear import Embedding, Linear
from moe_jax.layers.mlp import MLP
from moe_jax.layers.moe import GradientTotal, MoE, WeightWithTotal
from moe_jax.layers.norm import RMSNorm
from moe_jax.layers.rope import rope_tables
from moe_jax.layers.router import ExpertBias, RouterStatistics, Routing, load_balancing_loss, route
from moe_jax.layers.segments import later, reaches, runs, segment_positions
from moe_jax.layers.stack import Remat, run_layers
from moe_jax.models.decoder_layer import DecoderLayer, SparseDecoderLayer
from moe_jax.models.execution import Execution
from moe_jax.models.inputs import check_options, check_shapes, float_dtype, integers, token_ids
from moe_jax.models.mtp import TokenPredictor
from moe_jax.models.output import HiddenStates, ModelOutput
from moe_jax.parallel.expert import ExpertParallel
from moe_jax.parallel.fsdp import LayerGather
from moe_jax.parallel.sequence.attention import ContextParallel

NO_WINDOW = 2**30
"""A sliding window longer than any sequence, for the layers of a sliding model that see everything."""


class Decoder(nnx.Module):
    """A language model: token ids in, logits out. An architecture says what its attention and its experts are.

    Args:
      config: the architecture.
      dtype: what the model computes in; norms, softmax and router are f32 inside.
      param_dtype: what the parameters are held in (default: dtype). f32 parameters under bf16 compute are master weights.
      rngs: `nnx.Rngs(seed)` for the random initialisation.

    Attributes:
      stages: the layers of `config.stages`, and behind them the modules of `config.mtp_stages`.
      execution: the defaults of a call's `remat` and of how it is spread over devices.
      source: the folder that the weights were read from, if any; `save_pretrained` passes its tokenizer files along.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: DTypeLike = jnp.float32, param_dtype: DTypeLike | None = None, rngs: nnx.Rngs
    ):
        self.config = config
        self.dtype = float_dtype(dtype)
        param_dtype = self.dtype if param_dtype is None else float_dtype(param_dtype, "param_dtype")
        self.source: str | None = None
        self.execution = Execution()
        std = config.initializer_range
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, stddev=std, param_dtype=param_dtype, rngs=rngs)
        layers = [self._decoder_layers(stage, param_dtype, rngs) for stage in config.stages]
        predictors = [self._predictor(stage, param_dtype, rngs) for stage in config.mtp_stages]
        self.stages = nnx.List([*layers, *predictors])
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, param_dtype=param_dtype)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, stddev=std, param_dtype=param_dtype, rngs=rngs)

    def __call__(self, tokens: Int[Array, "batch seq"], positions=None, segment_ids=None, **options) -> ModelOutput:
        """Logits for every position; arguments as in `hidden_states`.

        Raises:
          TypeError: an option that `hidden_states` has not.
          ValueError: as `hidden_states`.
        """
        check_options(options, OPTIONS)
        states = self.hidden_states(tokens, positions, segment_ids, **options)
        logits = jnp.einsum("bsd,vd->bsv", states.hidden, self.head_weight.astype(self.dtype))
        return ModelOutput(logits, load_balancing_loss(states.router), states.router, states.expert_ids, states.cache)

    def hidden_states(
        self,
        tokens: Int[Array, "batch seq"],
        positions: Int[Array, "batch seq"] | None = None,
        segment_ids: Int[Array, "batch seq"] | None = None,
        *,
        cache: KVCache | None = None,
        expert_ids: Int[Array, "moe_layers batch seq k"] | None = None,
        remat: Remat = False,
        force_balanced_routing: bool = False,
        context_parallel: ContextParallel | None = None,
        expert_parallel: ExpertParallel | None = None,
        layer_gathers: Sequence[LayerGather | None] | None = None,
        sequence_balance: bool = False,
    ) -> HiddenStates:
        """Everything but the vocabulary projection, for losses that never hold all logits.

        Args:
          tokens: token ids, as an array or lists. An id outside the vocabulary is an error where values are known cheaply
            (`models.inputs.token_ids`); under `jax.jit` it gives NaN.
          positions: for the rotary embedding; default: the index in the segment.
          segment_ids: 0 is padding; tokens attend within equal ids that neighbour each other, and with a cache within equal
            ids. Default: all one segment.
          cache: earlier tokens (`layers.cache`). These tokens are written behind them and attend to all of their segment;
            pass `positions`, which the cache cannot know. Into an empty cache (`init_cache`) they are written alone, and attend
            to each other as without one. More than it has room for are an error, but under `jax.jit`, where its length is not
            known, they overwrite its last ones.
          expert_ids: routing replay: the experts to use (`HiddenStates.expert_ids` of another call), weighted by live logits.
          remat: recompute each layer in the backward pass and keep only its input; "offload": in the host's memory.
          force_balanced_routing: deal tokens to experts in turn, ignoring the router's choice; for benchmarks only.
          context_parallel: inside a `jax.shard_map` in which each device holds its own part of every sequence: how they are
            split. The router's sums are then of this device's tokens (`layers.router.sum_over_mesh`).
          expert_parallel: inside a `jax.shard_map` in which each device holds its own tokens and its part of the experts: how
            the tokens travel. The router's sums are then of this device's tokens (`layers.router.sum_over_mesh`).
          layer_gathers: inside `jax.shard_map`, `ShardedParameters.layers` where the stages' parameters are a device's parts.
          sequence_balance: also sum what `layers.router.sequence_balance_loss` needs.

        Raises:
          ValueError: tokens that are no integers or outside the vocabulary, shapes that do not fit each other, a cache without
            positions or room, or one beside context_parallel.
        """
        execution = self.execution
        remat, force_balanced_routing = remat or execution.remat, force_balanced_routing or execution.balanced_routing
        context_parallel = context_parallel or execution.spread.context
        expert_parallel = expert_parallel or execution.spread.expert
        layer_gathers = execution.spread.layer_gathers if layer_gathers is None else layer_gathers
        config = self.config
        tokens = token_ids(tokens, config.vocab_size)
        positions = None if positions is None else integers(positions, "positions")
        segment_ids = None if segment_ids is None else integers(segment_ids, "segment_ids")
        check_shapes(config, tokens, positions, segment_ids, cache, expert_ids)
        if segment_ids is None:
            segment_ids = jnp.ones_like(tokens)
        counted = segment_ids != 0
        shared, memory = self._surroundings(positions, segment_ids, cache, context_parallel, counted, sequence_balance)
        windows = None
        if any(config.layer_windows):
            windows = jnp.array([window or NO_WINDOW for window in config.layer_windows], jnp.int32)
        options = dict(
            remat=remat,
            force_balanced_routing=force_balanced_routing,
            context_parallel=context_parallel,
            expert_parallel=expert_parallel,
        )
        x = self.embed_tokens(tokens, self.dtype)
        routings, first_moe_layer = [], 0
        for s, stage in enumerate(config.stages):
            rows = slice(stage.first_layer, stage.first_layer + stage.num_layers)
            replay = None
            if stage.sparse and expert_ids is not None:
                replay = expert_ids[first_moe_layer : first_moe_layer + stage.num_layers]
            first_moe_layer += stage.num_layers if stage.sparse else 0
            of_layer = jnp.arange(rows.start, rows.stop), None if windows is None else windows[rows], replay
            gather = None if layer_gathers is None else layer_gathers[s]
            (x, memory), routing = _run_stage(self.stages[s], shared, of_layer, (x, memory), gather, **options)
            if stage.sparse:
                routings.append(routing)
        *_, sequences = shared
        return _collect(self.norm(x), routings, counted, sequences, memory)

    def further_hidden_states(
        self,
        hidden: Float[Array, "batch seq hidden"],
        tokens: Int[Array, "batch seq"],
        positions: Int[Array, "batch seq"] | None = None,
        segment_ids: Int[Array, "batch seq"] | None = None,
        **options,
    ) -> list[HiddenStates]:
        """What `predict` gives of each module in turn: `head_weight` makes of entry k - 1 at i the logits of token i + k + 1.

        Args:
          hidden: `HiddenStates.hidden` for these tokens.
          options: as in `predict`.
        """
        if segment_ids is None:
            segment_ids = jnp.ones_like(tokens)
        context_parallel = options.get("context_parallel") or self.execution.spread.context
        further = []
        for k in range(1, len(self.config.mtp_stages) + 1):
            valid = reaches(segment_ids, k, context_parallel)
            following = later(tokens, k, context_parallel)
            further.append(self.predict(k, hidden, following, positions, segment_ids, valid=valid, **options))
            hidden = further[-1].hidden
        return further

    def predict(
        self,
        module: int,
        hidden: Float[Array, "batch seq hidden"],
        following: Int[Array, "batch seq"],
        positions: Int[Array, "batch seq"] | None = None,
        segment_ids: Int[Array, "batch seq"] | None = None,
        *,
        valid: Bool[Array, "batch seq"] | None = None,
        cache: KVCache | None = None,
        remat: Remat = False,
        force_balanced_routing: bool = False,
        context_parallel: ContextParallel | None = None,
        expert_parallel: ExpertParallel | None = None,
        layer_gathers: Sequence[LayerGather | None] | None = None,
        sequence_balance: bool = False,
    ) -> HiddenStates:
        """Hidden states of one of the modules that predict further tokens (`models.mtp`).

        Args:
          module: its number, from 1.
          hidden: `HiddenStates.hidden` of the model for module 1, else of module - 1.
          following: for each token the one that stands `module` places behind it.
          positions, segment_ids: those of the tokens that `hidden` is of.
          valid: where there is such a token in the document, for the router's sums; default: everywhere but in padding. A
            token where there is none is the document's last or near it, so that no other sees it.
          cache: of this module's layer alone, as in `hidden_states`.
          remat, force_balanced_routing, context_parallel, expert_parallel, layer_gathers, sequence_balance: as in
            `hidden_states`. A sequence is that of the tokens that are counted.

        Raises:
          ValueError: no such module, and as `hidden_states`.
        """
        execution = self.execution
        remat, force_balanced_routing = remat or execution.remat, force_balanced_routing or execution.balanced_routing
        context_parallel = context_parallel or execution.spread.context
        expert_parallel = expert_parallel or execution.spread.expert
        layer_gathers = execution.spread.layer_gathers if layer_gathers is None else layer_gathers
        stages = self.config.mtp_stages
        if not 1 <= module <= len(stages):
            raise ValueError(f"module must be from 1 to the {len(stages)} modules that this model has; got {module}")
        following = token_ids(following, self.config.vocab_size, "following")
        check_shapes(self.config, following, positions, segment_ids, cache, None)
        if segment_ids is None:
            segment_ids = jnp.ones_like(following)
        counted = segment_ids != 0 if valid is None else valid
        shared, memory = self._surroundings(positions, segment_ids, cache, context_parallel, counted, sequence_balance)
        s = len(self.config.stages) + module - 1
        (x, memory), routing = _run_stage(
            self.stages[s],
            shared,
            (jnp.zeros(1, jnp.int32), None, None),
            ((hidden, self.embed_tokens(following, self.dtype)), memory),
            None if layer_gathers is None else layer_gathers[s],
            remat=remat,
            force_balanced_routing=force_balanced_routing,
            context_parallel=context_parallel,
            expert_parallel=expert_parallel,
        )
        *_, sequences = shared
        return _collect(x[0], [routing] if stages[module - 1].sparse else [], counted, sequences, memory)

    @property
    def head_weight(self) -> Float[Array, "vocab hidden"]:
        """The vocabulary projection: the embedding table itself when the two are tied."""
        return self.embed_tokens.weight[...] if self.config.tie_word_embeddings else self.lm_head.weight[...]

    def _decoder_layers(self, stage: Stage, param_dtype, rngs: nnx.Rngs) -> DecoderLayer:
        """The layers of one stage, stacked."""
        config = self.config
        stacked: dict[str, Any] = dict(stack=(stage.num_layers,), param_dtype=param_dtype)
        if stage.sparse:
            experts = self._experts(**stacked, rngs=rngs)
            return SparseDecoderLayer(config, experts, self._attention(**stacked, rngs=rngs), **stacked)
        mlp = MLP(config.hidden_size, config.intermediate_size, stddev=config.initializer_range, **stacked, rngs=rngs)
        return DecoderLayer(config, mlp, self._attention(**stacked, rngs=rngs), **stacked)

    def _predictor(self, stage: Stage, param_dtype, rngs: nnx.Rngs) -> TokenPredictor:
        """A module that predicts further tokens, stacked as a stage of one layer."""
        block = self._decoder_layers(stage, param_dtype, rngs)
        return TokenPredictor(self.config, block, stack=(stage.num_layers,), param_dtype=param_dtype, rngs=rngs)

    def _attention(self, *, stack: tuple[int, ...], param_dtype, rngs: nnx.Rngs) -> nnx.Module:
        """The attention of so many layers, called as `layers.attention.Attention` is."""
        raise NotImplementedError

    def _experts(self, *, stack: tuple[int, ...], param_dtype, rngs: nnx.Rngs) -> MoE:
        """The mixture of experts of so many layers, for architectures that have some."""
        raise NotImplementedError

    def _surroundings(
        self, positions, segment_ids, cache: KVCache | None, context_parallel: ContextParallel | None, valid, sequence_balance
    ):
        """What layers know of the tokens, (cos, sin, segments, valid, sequences), and the cache with their segments in it."""
        config = self.config
        if cache is not None and context_parallel is not None:
            raise ValueError("cache and context_parallel cannot be given together: cached tokens are not split over devices")
        segments = segment_ids
        if context_parallel is not None:
            segments = context_parallel.starts_of_segments(segment_ids)
        elif cache is None:
            segments = runs(segment_ids)
        if positions is None:
            positions = segment_positions(segment_ids) if context_parallel is None else context_parallel.positions(segments)
        cos, sin = rope_tables(positions, config.rope_parameters, config.rotary_dim, config.max_position_embeddings)
        memory = None
        if cache is not None:
            start = (0, cache.length)
            # Where none were given, the segments have the tokens' dtype.
            ids = segment_ids.astype(cache.segment_ids.dtype)
            segments_in_cache = jax.lax.dynamic_update_slice(cache.segment_ids, ids, start)
            memory = replace(cache, kept=vary_as(cache.kept, segment_ids), segment_ids=segments_in_cache)
        sequences = Sequences.of(jnp.where(valid, segment_ids, 0), context_parallel) if sequence_balance else None
        return (cos, sin, segments, valid, sequences), memory


OPTIONS = tuple(
    name
    for name, parameter in inspect.signature(Decoder.hidden_states).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
)
"""The options of a call: all keywords of `hidden_states`."""


def _run_stage(
    layers: nnx.Module, shared, of_layer, carry, gather, *, remat, force_balanced_routing, context_parallel, expert_parallel
):
    """The layers of a stage one after the other: (the (x, memory) behind the last, the routing of each).

    `of_layer` is (index in the memory, window, experts to replay) of each layer.
    """
    graph, parameters, *rest = nnx.split(layers, nnx.Param, GradientTotal, (ExpertBias, WeightWithTotal))
    totals, others = rest

    def body(shared, of_layer, carry, parameters, totals):
        cos, sin, segments, valid, sequences = shared
        (layer, window, replay), others = of_layer
        x, memory = carry
        attend = Attend(segments, layer, window, memory, context_parallel)
        block = nnx.merge(graph, parameters, totals, others)
        x, memory, routing = block(
            x, cos, sin, attend, valid.reshape(-1), replay, force_balanced_routing, expert_parallel, sequences
        )  # fmt: skip
        return (x, memory), routing

    return run_layers(body, shared, (of_layer, others), carry, parameters, gather, totals, remat=remat)


def _collect(hidden, routings: list[Routing], valid, sequences: Sequences | None, memory: KVCache | None) -> HiddenStates:
    """The stages' routings as one array over all MoE layers each, and the tokens counted in the cache."""
    if memory is not None:
        memory = replace(memory, written=jnp.asarray(memory.length + valid.shape[1], jnp.int32))
    joined = jax.tree.map(lambda *layers: jnp.concatenate(layers), *(routings or [_of_no_layer(valid.size)]))
    sums = joined._asdict()
    del sums["weights"], sums["experts"], sums["num_tokens"]
    stats = RouterStatistics(
        **sums,
        num_tokens=valid.sum().astype(jnp.float32),
        num_sequences=jnp.zeros((), jnp.float32) if sequences is None else sequences.share(jnp.float32).sum(),
    )
    layers, _, choices = joined.experts.shape
    return HiddenStates(hidden, stats, joined.experts.reshape(layers, *valid.shape, choices), memory)


def _of_no_layer(tokens: int) -> Routing:
    """The stacked routing of a model without experts."""
    of_a_layer = jax.eval_shape(lambda logits: route(logits, 0, False), jax.ShapeDtypeStruct((tokens, 0), jnp.float32))
    return jax.tree.map(lambda a: jnp.zeros((0, *a.shape), a.dtype), of_a_layer)
