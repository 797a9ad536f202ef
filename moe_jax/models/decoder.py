"""The frame of every architecture here: embedding, stages of decoder layers, norm and vocabulary projection."""

import difflib
import inspect
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Integer

from moe_jax.config import LatentSpec, LayerKind, Mixer, ModelConfig, Stage
from moe_jax.kernels.experts.activation import Activation
from moe_jax.kernels.experts.fp8 import quantise
from moe_jax.kernels.experts.fp8.precision import DenseGroup, Precision
from moe_jax.layers.attention import Attention
from moe_jax.layers.cache import KVCache, cache_rows
from moe_jax.layers.latent_attention import LatentAttention
from moe_jax.layers.linear import Embedding, Linear, RMSNorm
from moe_jax.layers.loops import Pass
from moe_jax.layers.lora import Adapter, beside_head, wider_head
from moe_jax.layers.mlp import MLP
from moe_jax.layers.moe import MoE, precision_of, set_precision
from moe_jax.layers.passes import Remat, forward_loop
from moe_jax.layers.router import check_expert_choice, load_balancing_loss
from moe_jax.layers.segments import has_successor, shift_left
from moe_jax.models.execution import Execution
from moe_jax.models.forward import (
    Carry,
    DecoderLayer,
    Entered,
    LayerInputs,
    LayerPattern,
    PerLayer,
    SparseDecoderLayer,
    StageRouting,
    collect,
    layer_inputs,
    run_stage,
    stage_layers,
)
from moe_jax.models.inputs import check_shapes, float_dtype, integers, refuse_deleted, token_ids
from moe_jax.models.mtp import PredictorState, TokenPredictor
from moe_jax.models.output import HiddenStates, ModelOutput
from moe_jax.parallel.pipeline.chunks import refuse_chunks
from moe_jax.parallel.sequence.attention import ContextParallel
from moe_jax.parallel.spread import Spread

NO_WINDOW = 2**30
"""A window longer than any sequence, for the full-attention layers of a model with sliding windows."""


class Decoder(nnx.Module):
    """A language model: token ids in, logits out. It builds the attention and experts of the config's specs.

    Args:
      config: the architecture.
      dtype: dtype of the computation; norms, softmax and router are f32 inside.
      param_dtype: dtype of the parameters (default: dtype). f32 parameters under bf16 compute are master weights.
      rngs: `nnx.Rngs(seed)` for the random initialisation.

    Attributes:
      stages: the layers of `config.stages`, then the modules of `config.mtp_stages`.
      execution: the defaults of a call's `remat` and `spread`, and of balanced routing.
      source: the folder that the weights were read from, if any; `save_pretrained` copies its tokenizer files.
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

    def __call__(self, tokens: Integer[Array, "batch seq"], positions=None, segment_ids=None, **options) -> ModelOutput:
        """Computes the logits of every position; arguments as in `hidden_states`.

        Raises:
          TypeError: an option that `hidden_states` does not have.
          ValueError: as `hidden_states`.
        """
        for name in options:
            _check_option(name)
        states = self.hidden_states(tokens, positions, segment_ids, **options)
        logits = jnp.einsum("bsd,vd->bsv", states.hidden, self.head_weight.astype(self.dtype))
        return ModelOutput(logits, load_balancing_loss(states.router), states.router, states.expert_ids, states.cache)

    def hidden_states(
        self,
        tokens: Integer[Array, "batch seq"],
        positions: Int[Array, "batch seq"] | None = None,
        segment_ids: Integer[Array, "batch seq"] | None = None,
        *,
        cache: KVCache | None = None,
        expert_ids: Integer[Array, "moe_layers batch seq k"] | Literal["balanced"] | None = None,
        remat: Remat | int | str | None = None,
        spread: Spread | None = None,
        sequence_balance: bool = False,
    ) -> HiddenStates:
        """Runs the model up to the vocabulary projection, for losses that never materialize all logits.

        Args:
          tokens: token ids, as an array or lists. An id outside the vocabulary is an error if values can be read cheaply
            (`models.inputs.token_ids`); under `jax.jit` it yields NaN.
          positions: for the rotary embedding; default: the index in the segment.
          segment_ids: 0 is padding. Tokens attend within neighbouring equal ids; with a cache, within all equal ids. Default:
            one segment.
          cache: earlier tokens (`layers.cache`). The call's tokens are written after them and attend to all of their segment;
            pass `positions`, which the cache does not know. With an empty cache (`init_cache`) the tokens attend to each other
            as without a cache. More tokens than it has room for are an error. Under `jax.jit` the length is not known, and they
            overwrite the cache's last tokens.
          expert_ids: routing replay: the experts to use (`HiddenStates.expert_ids` of another call), weighted by live logits.
            An id of -1 adds nothing (`layers.router.route`). "balanced" deals tokens to experts in turn, for benchmarks only.
            None: the router's choice, or "balanced" if the model's `execution` sets it.
          remat: recompute each layer in the backward pass and keep only its input; "offload" keeps it in the host's memory.
            A number of last layers that keep all their residuals, with any parts that the others keep, as in `make_train_step`.
            None: as the model's `execution`.
          spread: how the call is spread over devices, inside a `jax.shard_map`. The router's sums are then over this device's
            tokens (`RouterSums.psum`). None: as the model's `execution`.
          sequence_balance: also sum what `layers.router.sequence_balance_loss` needs.

        Raises:
          ValueError: tokens that are no integers or outside the vocabulary; shapes that do not fit each other; or another text
            than "balanced". A cache without positions or room, or with `spread.context`. Layers split into a pipeline's chunks,
            which only `train.make_train_step` and `train.make_evaluation` run.
        """
        execution = self._execution(remat, spread)
        if isinstance(expert_ids, str):
            check_expert_choice(expert_ids)
            execution, expert_ids = replace(execution, balanced_routing=True), None
        elif expert_ids is not None:
            execution = replace(execution, balanced_routing=False)
        options: dict[str, Any] = dict(cache=cache, expert_ids=expert_ids, sequence_balance=sequence_balance)
        inputs, per_layer, carry = self.enter(tokens, positions, segment_ids, context=execution.spread.context, **options)
        routings = []
        for number, of_stage in enumerate(per_layer):
            own = execution.of_stage(self.config, number)
            carry, routing = run_stage(self.stages[number], number, inputs, of_stage, carry, own)
            if routing is not None:
                routings.append(routing)
        return self.leave(inputs, carry, routings)

    def enter(
        self,
        tokens: Integer[Array, "batch seq"],
        positions: Integer[Array, "batch seq"] | None = None,
        segment_ids: Integer[Array, "batch seq"] | None = None,
        *,
        cache: KVCache | None = None,
        expert_ids: Integer[Array, "moe_layers batch seq k"] | None = None,
        context: ContextParallel | None = None,
        sequence_balance: bool = False,
    ) -> Entered:
        """Runs the part of `hidden_states` before the first layer: checks the arguments and embeds the tokens.

        Arguments and errors as in `hidden_states`; `context` is `Spread.context`.
        """
        refuse_chunks(nnx.state(self.stages), "a call of the model")
        refuse_deleted(nnx.state(self))
        config = self.config
        tokens = token_ids(tokens, config.vocab_size)
        positions = None if positions is None else integers(positions, "positions")
        segment_ids = None if segment_ids is None else integers(segment_ids, "segment_ids")
        check_shapes(config, tokens, positions, segment_ids, cache, expert_ids)
        if segment_ids is None:
            segment_ids = jnp.ones_like(tokens)
        inputs = layer_inputs(
            config, positions, segment_ids, segment_ids != 0, cache=cache, context=context, sequence_balance=sequence_balance
        )
        carry = Carry(self.embed_tokens(tokens, self.dtype), None if cache is None else cache.with_segments(segment_ids))
        return Entered(inputs, _per_layer(config, expert_ids), carry)

    def forward_pass(
        self,
        tokens: Integer[Array, "batch seq"],
        positions: Integer[Array, "batch seq"],
        segment_ids: Integer[Array, "batch seq"],
        *,
        cache: KVCache | None = None,
        spread: Spread | None = None,
    ) -> Pass:
        """Returns `hidden_states` as a `layers.loops.Pass`, which can overlap with another batch's pass; same arguments.

            of_one, of_other = run_together(model.forward_pass(*one), model.forward_pass(*other))

        A joined loop sends the tokens of each batch to other devices' experts while the other batch computes. It cannot be
        differentiated; `train.micro_batch` has passes for training.
        """
        execution = self._execution(None, spread)
        options: dict[str, Any] = dict(cache=cache, context=execution.spread.context)
        inputs, per_layer, carry = self.enter(tokens, positions, segment_ids, **options)
        routings = []
        for number, of_stage in enumerate(per_layer):
            layers, arrays = stage_layers(self.stages[number], number, inputs, of_stage, execution)
            # With remat the loop stacks only the layers' inputs, and XLA removes a stack that nothing reads.
            run = yield forward_loop(layers._replace(remat=True), arrays, carry)
            carry = run.x
            if run.y is not None:
                routings.append(run.y)
        return self.leave(inputs, carry, routings)

    def leave(self, inputs: LayerInputs, carry: Carry, routings: list[StageRouting]) -> HiddenStates:
        """Runs the part of `hidden_states` after the last layer: applies the final norm and concatenates the routings.

        Args:
          inputs: the result of `enter`.
          carry: the last layer's.
          routings: one for each stage with experts, in order.
        """
        return collect(self.normed(carry.x), routings, inputs, carry.cache)

    def normed(self, x: Float[Array, "batch seq hidden"]) -> Float[Array, "batch seq columns"]:
        """Applies the final norm to the last layer's output; with an adapter of the head, appends its product with a."""
        adapter, hidden = self._head_adapter, self.norm(x)
        return hidden if adapter is None else beside_head(adapter, hidden)

    def mtp_hidden_states(
        self,
        hidden: Float[Array, "batch seq hidden"],
        tokens: Integer[Array, "batch seq"],
        positions: Int[Array, "batch seq"] | None = None,
        segment_ids: Integer[Array, "batch seq"] | None = None,
        *,
        execution: Execution | None = None,
        sequence_balance: bool = False,
    ) -> list[HiddenStates]:
        """Runs all multi-token prediction (MTP) modules, in order.

        Args:
          hidden: `HiddenStates.hidden` for these tokens.
          positions, segment_ids, execution, sequence_balance: as in `predict`.

        Returns:
          The hidden states of each module. `head_weight` makes from entry k - 1, position i, the logits of token i + k + 1.
        """
        if segment_ids is None:
            segment_ids = jnp.ones_like(tokens)
        context = (execution or self.execution).spread.context
        states: list[HiddenStates] = []
        for module in range(1, len(self.config.mtp_stages) + 1):
            following = shift_left(tokens, module, context)
            options: dict[str, Any] = dict(execution=execution, sequence_balance=sequence_balance)
            states.append(self.predict(module, hidden, following, positions, segment_ids, **options))
            hidden = states[-1].hidden
        return states

    def predict(
        self,
        module: int,
        hidden: Float[Array, "batch seq hidden"],
        following: Integer[Array, "batch seq"],
        positions: Int[Array, "batch seq"] | None = None,
        segment_ids: Integer[Array, "batch seq"] | None = None,
        *,
        cache: KVCache | None = None,
        execution: Execution | None = None,
        sequence_balance: bool = False,
    ) -> HiddenStates:
        """Runs one multi-token prediction (MTP) module and returns its hidden states (`models.mtp`).

        Without a cache, the router's sums skip the last `module` tokens of each document, whose `following` is not of the
        document. No counted token sees them. With a cache the caller chooses the following tokens, and the sums count all
        tokens but padding.

        Args:
          module: the module's number, from 1.
          hidden: `HiddenStates.hidden` of the model for module 1, else of module - 1.
          following: for each token, the token `module` positions later.
          positions, segment_ids: the positions and segments of the tokens that `hidden` belongs to.
          cache: the cache of only this module's layer, as in `hidden_states`.
          execution: replaces the model's `execution` for this call.
          sequence_balance: as in `hidden_states`. A sequence consists of the counted tokens.

        Raises:
          ValueError: no such module, and as `hidden_states`.
        """
        execution, config = execution or self.execution, self.config
        if not 1 <= module <= len(config.mtp_stages):
            raise ValueError(f"module must be from 1 to the {len(config.mtp_stages)} modules that this model has; got {module}")
        following = token_ids(following, config.vocab_size, "following")
        check_shapes(config, following, positions, segment_ids, cache, None)
        if segment_ids is None:
            segment_ids = jnp.ones_like(following)
        context = execution.spread.context
        inputs = layer_inputs(
            config,
            positions,
            segment_ids,
            segment_ids != 0 if cache is not None else has_successor(segment_ids, module, context),
            cache=cache,
            context=context,
            sequence_balance=sequence_balance,
        )
        state = PredictorState(hidden, self.embed_tokens(following, self.dtype))
        carry = Carry(state, None if cache is None else cache.with_segments(segment_ids))
        number = len(config.stages) + module - 1
        execution = execution.of_stage(self.config, number)
        carry, routing = run_stage(self.stages[number], number, inputs, PerLayer(jnp.zeros(1, jnp.int32)), carry, execution)
        return collect(carry.x.hidden, [] if routing is None else [routing], inputs, carry.cache)

    def set_precision(self, precision: Precision | str | None, dense: tuple[DenseGroup, ...] = ()) -> None:
        """Sets the precision of the experts' matmuls in all later calls, for training and generation.

        Args:
          precision: a `kernels.Precision`, the name of one ("fp8", "fp8_kept"), or None or "bf16" for the model's dtype.
          dense: with a name, groups of dense matrices that also multiply in FP8, as in `Precision.dense`.

        Raises:
          ValueError: an unknown name; or FP8 for a model without experts, of another dtype than bf16, or whose experts' sizes
            are not multiples of 128. A group that matches no matrix of the model, or groups without an FP8 name.
        """
        if dense and not isinstance(precision, str):
            raise ValueError(f"dense={dense!r} needs a precision that is named; else give it to Precision(dense=...)")
        chosen = precision if isinstance(precision, Precision | None) else Precision.named(precision, dense)
        if chosen is not None and (reason := fp8_refusal(self.config, self.dtype, chosen.dense)) is not None:
            raise ValueError(f"{reason}; use precision 'bf16'")
        set_precision(self, chosen)

    @property
    def precision(self) -> Precision | None:
        """The precision of the experts' matmuls (`kernels.Precision`); None if they run in the model's dtype."""
        return precision_of(self)

    @property
    def head_weight(self) -> Float[Array, "vocab hidden"]:
        """The matrix that maps `HiddenStates.hidden` to logits; the embedding table itself if the two are tied.

        With an adapter of the head both are wider by its padded rank.
        """
        table = list(self.tables.values())[-1]
        weight = table.weight[...]
        if table.token_rows is not None:
            return table.token_rows.put(weight.astype(jnp.promote_types(weight.dtype, self.dtype)))
        if self._head_adapter is None:
            return weight
        # In the dtype of a frozen matrix that is narrower than the model's, b would be rounded, and its gradient.
        return wider_head(self._head_adapter, weight.astype(jnp.promote_types(weight.dtype, self.dtype)))

    @property
    def tables(self) -> dict[str, Embedding | Linear]:
        """The tables of the vocabulary by their names on the hub: the embedding, and a head that is not tied to it."""
        head = {} if self.config.tie_word_embeddings else {"lm_head": self.lm_head}
        return {"model.embed_tokens": self.embed_tokens, **head}

    @property
    def _head_adapter(self) -> Adapter | None:
        return None if self.config.tie_word_embeddings else self.lm_head.lora

    def _decoder_layers(self, stage: Stage, param_dtype, rngs: nnx.Rngs) -> DecoderLayer | LayerPattern:
        """Builds the layers of one stage, stacked over the repeats of its body."""
        config = self.config
        stacked: dict[str, Any] = dict(stack=(stage.repeats,), param_dtype=param_dtype)

        def layers(kind: LayerKind) -> DecoderLayer:
            if kind.sparse:
                experts = self._experts(**stacked, rngs=rngs)
                return SparseDecoderLayer(config, experts, self._mixer(kind.mixer, **stacked, rngs=rngs), **stacked)
            mlp = MLP(config.hidden_size, config.intermediate_size, stddev=config.initializer_range, **stacked, rngs=rngs)
            return DecoderLayer(config, mlp, self._mixer(kind.mixer, **stacked, rngs=rngs), **stacked)

        places = [layers(kind) for kind in stage.body]
        return places[0] if len(places) == 1 else LayerPattern(places)

    def _predictor(self, stage: Stage, param_dtype, rngs: nnx.Rngs) -> TokenPredictor:
        """Builds an MTP module, stacked as a stage of one layer."""
        block = self._decoder_layers(stage, param_dtype, rngs)
        return TokenPredictor(self.config, block, stack=(stage.repeats,), param_dtype=param_dtype, rngs=rngs)

    def _mixer(self, mixer: Mixer, *, stack: tuple[int, ...], param_dtype, rngs: nnx.Rngs) -> nnx.Module:
        """Builds the token mixer of a stack of layers; same call signature as `layers.attention.Attention`."""
        of_spec: Any = LatentAttention if isinstance(mixer, LatentSpec) else Attention
        return of_spec(self.config, stack=stack, param_dtype=param_dtype, rngs=rngs)

    def _experts(self, *, stack: tuple[int, ...], param_dtype, rngs: nnx.Rngs) -> MoE:
        """Builds the mixture of experts of a stack of layers."""
        config, spec = self.config, self.config.experts
        assert spec is not None
        options: dict[str, Any] = dict(stddev=config.initializer_range, stack=stack, param_dtype=param_dtype, rngs=rngs)
        sizes = config.hidden_size, spec.moe_intermediate_size, spec.num_experts, spec.num_experts_per_tok
        norm = RMSNorm(sizes[0], eps=config.rms_norm_eps, stack=stack, param_dtype=param_dtype) if spec.output_norm else None
        options |= dict(shared_intermediate_size=spec.shared_intermediate_size, shared_gate=spec.shared_gate)
        options |= dict(biases=spec.biases, activation=Activation(*spec.activation))
        return MoE(*sizes, rule=spec.rule, output_norm=norm, **options)

    def _execution(self, remat: Remat | int | str | None, spread: Spread | None) -> Execution:
        """Returns the model's execution with a call's own settings in place of the defaults."""
        execution = self.execution if remat is None else self.execution.with_remat(remat)
        return execution if spread is None else replace(execution, spread=spread)


def fp8_refusal(config: ModelConfig, dtype: DTypeLike, dense: tuple[DenseGroup, ...] = ()) -> str | None:
    """Returns why a model's experts and these dense groups cannot use FP8; None if they can."""
    if config.experts is None:
        return "FP8 is for experts, and this model has none"
    sizes = config.hidden_size, config.experts.moe_intermediate_size
    if (reason := quantise.refusal(jnp.dtype(dtype), *sizes)) is not None:
        return f"FP8 does not support this model's experts: {reason}"
    if config.experts.biases:
        return "FP8 does not support this model's experts: they have biases"
    if "shared_experts" in dense and not config.experts.shared_intermediate_size:
        return "FP8 of dense group 'shared_experts' is for shared experts, and this model has none"
    if "mlp" in dense and all(stage.sparse for stage in config.stages):
        return "FP8 of dense group 'mlp' is for dense layers, and this model has none"
    return None


OPTIONS = tuple(
    name
    for name, parameter in inspect.signature(Decoder.hidden_states).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
)
"""Names of a call's options: all keyword-only parameters of `hidden_states`."""


def _check_option(name: str) -> None:
    if name == "attention_mask":
        raise TypeError("a model takes no attention_mask: pass it as segment_ids, in which 0 is padding as in the mask")
    if name not in OPTIONS:
        near = difflib.get_close_matches(name, OPTIONS, 1)
        advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(OPTIONS)}"
        raise TypeError(f"a model takes no option {name!r}; {advice}")


def _per_layer(config: ModelConfig, expert_ids: Integer[Array, "moe_layers batch seq k"] | None) -> list[PerLayer]:
    """Returns the layers' own inputs, stage by stage; dense layers replay no experts."""
    windows = None
    if any(config.layer_windows):
        windows = jnp.array([window or NO_WINDOW for window in config.layer_windows], jnp.int32)
    rows = cache_rows(config)
    stages, first_moe_layer = [], 0
    for stage in config.stages:
        first, end, end_of_moe = stage.first_layer, stage.layers.stop, first_moe_layer + stage.num_layers
        replay = None
        if stage.sparse:
            replay = None if expert_ids is None else expert_ids[first_moe_layer:end_of_moe]
            first_moe_layer = end_of_moe
        window = None if windows is None else windows[first:end]
        places = len(stage.body)
        row = jnp.arange(rows[first], rows[first] + stage.num_layers) if places == 1 else jnp.array(rows[first:end])
        own = PerLayer(row, window, replay)
        if places > 1:
            own = jax.tree.map(lambda a, places=places: a.reshape(-1, places, *a.shape[1:]), own)
        stages.append(own)
    return stages
