"""The policy: a model that draws answers and learns from them by turns, with one copy of its weights.

    sample                              update
    the engine has pages                the engine sleeps: pages and its copies of weights are freed
    requests run                        audit, one training step, which donates the weights; the engine gets the new ones

On a mesh (`data`, `fsdp`) each device draws, and all learn together. Weights that `fsdp` splits are gathered on each device for
a rollout. The copies are deleted before the step, whose parameters, masters and moments stay split. Weights that are whole on
each device, such as frozen ones over `data`, are shared by the engine and the step.

In exact mode the engine's log-probabilities have strict bits, so the step needs no second forward pass for their values. It
computes the ordinary pass with the experts that the engine chose, and every ratio is exactly 1. Adapters are merged with copies
of their matrices, in the engine and in the step: round(W + scale b a), whose gradients reach the factors. The audit computes
`strict_log_probs` of some rows and compares all bits. Stale weights, shifted values or other experts do not pass it.
"""

import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, Literal

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Float

from moe_jax.adapters.merge import merged_copy, with_zero_changes, without_adapter
from moe_jax.adapters.names import targets_of
from moe_jax.config import ModelConfig
from moe_jax.layers.lora import has_adapters, has_dropout
from moe_jax.models.decoder import Decoder
from moe_jax.parallel.collectives.hops import default_hops
from moe_jax.parallel.fsdp import gathered_everywhere
from moe_jax.parallel.layout import mesh_of
from moe_jax.parallel.parallelism import Parallelism
from moe_jax.reinforcement.advantages import advantages, kept_groups, token_weights, total_rewards
from moe_jax.reinforcement.audit import AUDITED_ROWS, audit, on_rows, strict_rows
from moe_jax.reinforcement.objective import PolicyLoss, sampled_token_scores
from moe_jax.reinforcement.prompts import prompt_tokens, seed_of
from moe_jax.reinforcement.rows import policy_rows
from moe_jax.reinforcement.samples import Group, Sample
from moe_jax.reinforcement.settings import PolicySettings, mesh_problems
from moe_jax.serving.conversation import model_defaults
from moe_jax.serving.engine import Engine, check_config, check_servable
from moe_jax.serving.request import Completion, EngineLimits, SamplingOptions
from moe_jax.serving.weights import in_dtype
from moe_jax.train.batch import Batch, put_batch
from moe_jax.train.objective import refuse_further_predictors
from moe_jax.train.state import TrainState, init_state
from moe_jax.train.step import make_train_step

_logger = logging.getLogger(__name__)


class Policy:
    """A model that draws groups of answers (`sample`) and learns from their rewards (`update`), by turns.

        policy = Policy(model, optimizer, settings, tokenizer=tokenizer, limits=limits)
        groups = score(policy.sample(rows, step=0, seed=0), [reward])
        metrics = policy.update(groups)

    The model always has the present weights: an update writes its new arrays into the same object. Models with experts learn
    with the experts that drew the answers (routing replay).

    Attributes:
      engine: the engine that draws. It sleeps during an update, and refuses requests then.
      model: the model given.
      settings: the algorithm.
      state: the training state, for checkpoints.

    Args:
      model: a model on one device or on a mesh with the axes data and fsdp, with or without adapters.
      optimizer: an optax optimizer, such as `train.make_optimizer` returns.
      settings: the algorithm. Its `exact` decides whether the engine and the update compute equal bits.
      tokenizer: renders prompts, and decodes answers.
      limits: the engine's sizes on each device. On a mesh `replicas` is its number of devices.
      seq_len: tokens of a packed row of an update; default: the limits' `max_length`.
      rows: rows that each device computes at once in an update.
      on_mismatch: "stop" raises if the audit of exact mode finds a token whose bits differ; "warn" logs it.

    Raises:
      ValueError: settings that the model does not support, or a `seq_len` below the limits' `max_length`.
    """

    def __init__(
        self,
        model: Decoder,
        optimizer: optax.GradientTransformation,
        settings: PolicySettings,
        *,
        tokenizer: Any,
        limits: EngineLimits | None = None,
        seq_len: int | None = None,
        rows: int = 1,
        on_mismatch: Literal["stop", "warn"] = "stop",
    ):
        limits = EngineLimits() if limits is None else limits
        self.model, self.settings, self._mesh = model, settings, mesh_of(nnx.state(model))
        self._devices = 1 if self._mesh is None else self._mesh.size
        self._seq_len, self._rows = limits.max_length if seq_len is None else seq_len, rows * self._devices
        self._parallelism = None if self._mesh is None else Parallelism(self._mesh, hops=default_hops(self._mesh))
        self._whole: Decoder | None = None
        """On a mesh, the model that the engine serves, whole on each device; None while the engine sleeps."""
        self._check(limits, on_mismatch)
        self._tokenizer, self._stops = tokenizer, on_mismatch == "stop"
        self._defaults = model_defaults(model.source, model.config, tokenizer)
        self._make_step = partial(
            make_train_step, nnx.graphdef(model), optimizer, PolicyLoss(settings), parallelism=self._parallelism
        )
        self._steps: dict[int, Callable] = {}
        """Training steps by their largest number of micro-batches, each compiled once."""
        self._audits_all = True
        self.state = init_state(model, optimizer, self._parallelism)
        options: dict[str, Any] = dict(keep_experts=model.config.experts is not None, strict=settings.exact)
        self.engine = Engine(self.drawing_model(), limits=limits, lazy=True, **options)
        self.engine.temper_logprobs()

    def sample(self, rows: Sequence[tuple[int, Mapping[str, Any]]], *, step: int, seed: int, **changes: Any) -> Iterator[Group]:
        """Yields the group of each (key, row) as soon as all its answers are complete.

        Answers depend on weights, seed, step and key, not on the order of completion. Requests start together at the first
        `next`. If the iterator is closed early, the others are aborted.

        Args:
          changes: fields of `SamplingOptions` with other values, such as temperature=0.0 and n=1 for an evaluation.

        Raises:
          ValueError: a prompt that the chat template refuses, or that is too long for the engine's limits.
          RuntimeError: the engine sleeps, failed or was closed.
        """
        prompts = [prompt_tokens(self._tokenizer, row["prompt"]) for _, row in rows]
        chats = [not isinstance(row["prompt"], str) for _, row in rows]
        seeds = [seed_of(seed, step, key) for key, _ in rows]
        each = [self._options(is_chat, of_row, **changes) for is_chat, of_row in zip(chats, seeds, strict=True)]
        version = int(self.state.step)

        def drawn() -> Iterator[Group]:
            if not self.settings.exact:
                # Else a call's last bits would depend on the calls before it.
                self.engine.drop_prefixes()
            for index, completions in self.engine.as_completed(prompts, each):
                (key, row), tokens = rows[index], np.asarray(prompts[index], np.int32)
                samples = tuple(self._sample_of(one, each[index], version) for one in completions)
                yield Group(key=key, row=row, prompt_tokens=tokens, samples=samples)

        return drawn()

    def draw(self, prompt: list[int], seed: int, max_new_tokens: int) -> Sample:
        """Draws one answer of a chat; environments call this from their threads."""
        version, options = int(self.state.step), self._options(True, seed, n=1, max_new_tokens=max_new_tokens)
        ((completion,),) = self.engine.generate([prompt], options)
        return self._sample_of(completion, options, version)

    def update(self, groups: Iterable[Group]) -> dict[str, Any]:
        """Takes one training step on scored groups, in any order; the engine then has the new weights.

        Returns:
          The metrics of `PolicyLoss` and of the step, `groups_dropped`, `weights_version`, and the seconds time/update and
          time/sync. In exact mode also `audited_tokens`, `mismatch_tokens`, `mismatch_max` (the largest difference of
          log-probabilities) and time/audit.

        Raises:
          RuntimeError: answers are still being drawn; or in exact mode the audit found a token that differs.
          ValueError: groups without rewards, a sample longer than a row, or in exact mode one of older weights.
        """
        groups = sorted(groups, key=lambda group: group.key)
        # Without any spread all advantages are 0: such a step moves weights only by weight decay and the divergence.
        kept = kept_groups(groups, self.settings) or groups
        batch = self._batch(kept, sum(len(group.samples) for group in groups))
        self.engine.sleep()
        try:
            metrics = self._audited(kept, batch) if self.settings.exact else {}
            self._delete_whole()
            began = perf_counter()
            metrics |= self._learn(batch)
            trained = perf_counter()
        finally:
            # A step that failed after the donation leaves no weights to serve.
            if not any(array.is_deleted() for array in jax.tree.leaves(nnx.state(self.model))):
                self.engine.update(self.drawing_model())
        times = {"time/update": trained - began, "time/sync": perf_counter() - trained}
        return metrics | times | {"groups_dropped": len(groups) - len(kept), "weights_version": int(self.state.step)}

    def restore(self, state: TrainState) -> None:
        """Continues with the state of a checkpoint. The next update audits all its rows."""
        self.engine.sleep()
        self._delete_whole()
        self._set(state)
        self.engine.update(self.drawing_model())
        self._audits_all = True

    def drawing_model(self) -> Decoder:
        """Returns the model that the engine serves: in exact mode adapters are merged, since its kernels have none."""
        if self._whole is not None:
            return self._whole
        model = self.model if self._mesh is None else whole_on_each_device(self.model)
        model = merged_copy(model) if self.settings.exact and has_adapters(model) else model
        self._whole = None if self._mesh is None else model
        return model

    def log_probs(self, model: Decoder, batch: Mapping[str, np.ndarray]) -> Float[np.ndarray, "rows seq"]:
        """Returns the log-probabilities of a batch's learned tokens by the ordinary forward pass; 0 for other tokens.

        Args:
          model: whole on each device, such as `drawing_model`.
        """
        graphdef, weights = nnx.split(model)
        found, used = np.zeros(batch["tokens"].shape, np.float32), np.flatnonzero(batch["segment_ids"].any(axis=1))
        for first in range(0, len(used), self._rows):
            # The last rows are computed more than once, so that one program has them all.
            places = np.resize(used[first : first + self._rows], self._rows)
            rows = {name: array[places] for name, array in batch.items()}
            found[places] = _log_probs(graphdef, self.settings.temperature, self._mesh, weights, rows)
        return found

    def close(self) -> None:
        """Ends the engine and frees its memory; running requests are aborted. Model and state stay."""
        self.engine.close(drain=False)
        self._delete_whole()

    def _check(self, limits: EngineLimits, on_mismatch: str) -> None:
        settings, model = self.settings, self.model
        if on_mismatch not in ("stop", "warn"):
            raise ValueError(f'on_mismatch must be "stop" or "warn"; got {on_mismatch!r}')
        if self._seq_len < limits.longest_request:
            raise ValueError(
                f"seq_len={self._seq_len} must be at least {limits.longest_request}, the longest prompt with its answer that "
                "limits allow: every sample must fit in a row"
            )
        if problems := mesh_problems(
            {} if self._mesh is None else self._mesh.shape, limits.replicas, settings.exact, has_adapters(model)
        ):
            raise ValueError("; ".join(problems))
        if settings.beta and not has_adapters(model):
            raise ValueError(
                f"beta={settings.beta} needs a reference: train adapters (adapters.add_lora), whose reference is the model "
                "without them, or leave beta at 0"
            )
        adapted = {target.kind for target in targets_of(model) if target.found is not None}
        check_architecture(model.config, model.dtype, exact=settings.exact, adapted=adapted, drops=has_dropout(model))
        check_servable(self.drawing_model(), limits, drafts=0, strict=settings.exact)

    def _delete_whole(self) -> None:
        """Deletes the copies that were gathered for a rollout: with them an update would have no room."""
        own = set(map(id, jax.tree.leaves(nnx.state(self.model))))
        for array in jax.tree.leaves(None if self._whole is None else nnx.state(self._whole)):
            if id(array) not in own:
                array.delete()
        self._whole = None

    def _options(self, is_chat: bool, seed: int, **changes: Any) -> SamplingOptions:
        settings, ends = self.settings, self._defaults.ends_of_answers if is_chat else self._defaults.ends
        sizes: dict[str, Any] = dict(n=settings.samples, max_new_tokens=settings.max_new_tokens)
        sizes |= dict(temperature=settings.temperature, stop_token_ids=ends, seed=seed)
        return SamplingOptions(logprobs=0, return_experts=self.model.config.experts is not None, **sizes | changes)

    def _sample_of(self, completion: Completion, options: SamplingOptions, version: int) -> Sample:
        tokens, log_probs = np.asarray(completion.tokens, np.int32), np.asarray(completion.logprobs, np.float32)
        text = completion.tokens[:-1] if completion.finish_reason == "stop" else completion.tokens
        assert completion.seed is not None
        return Sample(
            seed=completion.seed,
            tokens=tokens,
            log_probs=log_probs,
            own=np.ones(len(tokens), bool),
            finish_reason=completion.finish_reason,
            text=self._tokenizer.decode(text, skip_special_tokens=True),
            weights_version=version,
            expert_ids=completion.experts,
        )

    def _batch(self, groups: Sequence[Group], num_rows: int) -> dict[str, np.ndarray]:
        """Returns the groups' samples packed in rows. Those up to `num_rows` that are not needed are skipped by the step."""
        version = int(self.state.step)
        for group in groups if self.settings.exact else ():
            if any(sample.weights_version != version for sample in group.samples):
                raise ValueError(
                    f"group {group.key} was drawn by weights of another step than {version}, and exact=True learns only from "
                    "answers of the present weights: draw it again, or set exact=False"
                )
        if any(sample.expert_ids is None for group in groups for sample in group.samples):
            # Groups of a journal have no experts.
            without = [tuple(replace(sample, expert_ids=None) for sample in group.samples) for group in groups]
            groups = [replace(group, samples=samples) for group, samples in zip(groups, without, strict=True)]
        rewards = [total_rewards(group, self.settings) for group in groups]
        values = advantages(rewards, self.settings), token_weights(groups, self.settings)
        number = -(-num_rows // self._rows)
        return policy_rows(groups, *values, seq_len=self._seq_len, num_rows=number * self._rows, micro_batches=number)

    def _audited(self, groups: Sequence[Group], batch: dict[str, np.ndarray]) -> dict[str, float]:
        """Returns the metrics of the audit. Adds experts to a batch that lacks them."""
        began = perf_counter()
        # No row at all has a weight if each sample failed.
        used = np.flatnonzero(batch["loss_mask"].any(axis=1)) if batch["loss_mask"].any() else np.arange(1)
        lacks_experts = self.model.config.experts is not None and "expert_ids" not in batch
        if not self._audits_all and not lacks_experts:
            used = np.random.default_rng(int(self.state.step)).permutation(used)[: AUDITED_ROWS * self._devices]
        of_engine = self.settings.temperature, self.engine.limits.kv_dtype
        metrics, mismatch = audit(self.drawing_model(), batch, groups, used, *of_engine)
        if mismatch is not None and self._stops:
            raise RuntimeError(f'{mismatch}; set exact=False, or on_mismatch="warn" to learn nevertheless')
        if mismatch is not None:
            _logger.warning("%s", mismatch)
        self._audits_all = False
        return metrics | {"time/audit": perf_counter() - began}

    def _learn(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        """Takes the training step; returns its metrics, scalars as floats."""
        number = len(batch["tokens"]) // self._rows
        if self.settings.beta:
            batch["reference_log_probs"] = self._reference(batch)
        if number not in self._steps:
            self._steps[number] = self._make_step(gradient_accumulation=number)
        state, metrics = self._steps[number](self.state, put_batch(batch, self.state.params, self._parallelism))
        self._set(state)
        return {name: np.asarray(value) if value.ndim else float(value) for name, value in metrics.items()}

    def _set(self, state: TrainState) -> None:
        self.state = state
        nnx.update(self.model, nnx.merge_state(state.params, state.fixed))

    def _reference(self, batch: dict[str, np.ndarray]) -> np.ndarray:
        model = with_zero_changes(self.model) if self.model.precision is not None else without_adapter(self.model)
        model = model if self._mesh is None else whole_on_each_device(model)
        if not self.settings.exact:
            return self.log_probs(model, batch)
        # By the same pass as the policy's values: else the divergence would not begin at 0.
        found, used = np.zeros(batch["tokens"].shape, np.float32), np.flatnonzero(batch["segment_ids"].any(axis=1))
        found[used, :-1] = strict_rows(model, batch, used, self.settings.temperature, self.engine.limits.kv_dtype)[0]
        return found


def check_architecture(
    config: ModelConfig, dtype: Any, *, exact: bool, adapted: Container[str] = (), drops: bool = False
) -> None:
    """Refuses a model that a policy cannot draw from or train, before its weights are read.

    Args:
      adapted: the kinds of its matrices with adapters.
      drops: True if its adapters have dropout.

    Raises:
      ValueError: no engine serves such models, or it has MTP modules. Or `exact`, and it has no strict kernels, or adapters of
        experts or with dropout.
    """
    refuse_further_predictors(config)
    check_config(config)
    if exact and "experts" in adapted:
        raise ValueError(
            "exact=True merges adapters with copies of their matrices, and a copy of all experts would need too much memory: "
            "give lora.targets without experts, such as ('attention',), or set exact=False"
        )
    if exact and drops:
        raise ValueError("exact=True needs lora.dropout=0: dropout would change the values that were drawn")
    if exact:
        from moe_jax.serving.fused import strict_refusal  # imports Pallas Mosaic GPU

        if (reason := strict_refusal(config, dtype)) is not None:
            raise ValueError(f"exact=True: strict bits are not computed for this model: {reason}; or set exact=False")


def whole_on_each_device(model: Decoder) -> Decoder:
    """Returns the model in its dtype, whole on each device of its mesh. It shares arrays that already are."""
    graphdef, state = nnx.split(model)
    return nnx.merge(graphdef, gathered_everywhere(in_dtype(state, model.dtype)))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _log_probs(graphdef: nnx.GraphDef, temperature: float, mesh: Mesh | None, weights: nnx.State, batch: Batch) -> jax.Array:
    def of_rows(weights: nnx.State, batch: Batch) -> jax.Array:
        return sampled_token_scores(nnx.merge(graphdef, weights), batch, temperature=temperature).log_probs

    return on_rows(mesh, of_rows)(weights, batch)
