"""The engine: serves many requests at once on one model, each independent of the others; and checks of models."""

import contextlib
import functools
import itertools
import weakref
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax.checkpoint.companions import generation_config
from moe_jax.config import ModelConfig
from moe_jax.generation.request import warn_of_length
from moe_jax.generation.speculative import DraftSource, check_drafts, draft_source
from moe_jax.generation.text import ends_of_answers
from moe_jax.layers.lora import has_adapters
from moe_jax.layers.moe import Experts
from moe_jax.layers.quantised import FP8_BLOCK, BlockScaled
from moe_jax.models.decoder import Decoder
from moe_jax.models.inputs import refuse_deleted
from moe_jax.parallel.pipeline.chunks import refuse_chunks
from moe_jax.serving.adapters import AdapterTable, NamedAdapter, read_stacks
from moe_jax.serving.chat import ChatRequest, Reply, prepare, reply_of
from moe_jax.serving.constraints import Constraint, bad_word_tokens, is_constrained
from moe_jax.serving.device import Device
from moe_jax.serving.grammar import Grammars
from moe_jax.serving.handle import Handle, as_completed
from moe_jax.serving.loop import EngineLoop, Stats
from moe_jax.serving.placement import Placement
from moe_jax.serving.replicas import Replicas
from moe_jax.serving.request import Completion, EngineLimits, KvDtype, SamplingOptions, check_prompts, checked, seeds_of
from moe_jax.serving.schedule import EngineQueues, Sequence
from moe_jax.serving.weights import take_apart

GREEDY = SamplingOptions()


class Engine:
    """Continues many prompts at once, with a token of each in every step.

        engine = Engine(moe_jax.from_pretrained(path))
        completions = engine.generate(prompts, SamplingOptions(max_new_tokens=100))
        for event in engine.submit(prompt, SamplingOptions(temperature=0.7)).events(): ...

    All programs are compiled before the constructor returns, unless `lazy`. Methods may be called from any thread.

    The engine reads the model's experts and embedding where they are. A training step that donates them ends all requests with
    an error that names this cause; `update` revives the engine.

    Args:
      model: any model of this library, with or without an adapter. The engine computes on all devices that hold it, each with
        its own prompts. On one device it reads experts where the model keeps them.
      limits: sizes of each device, which set its memory; default: `EngineLimits()`. With `replicas` above 1, further devices
        get a copy of the weights, unless the model is whole on each of them: as many devices a copy as hold the model. Requests
        go to the device that is free first.
      tokenizer: a Hugging Face tokenizer, with which events and completions have text, and stop texts end them.
      keep_experts: True makes room for each token's experts, for requests with `return_experts`.
      drafts: "lookup:3" drafts up to three tokens per step: those that followed an earlier occurrence of a sequence's newest
        tokens. It needs no module, and pauses for a sequence whose drafts are wrong. 1 drafts a token with the model's
        multi-token prediction module. A step then costs more and yields a token and the accepted drafts (`serving.drafts`).
        Tokens are the same up to rounding.
      strict: True makes a token's bits depend only on its own sequence, equal to `strict_log_probs`. For models
        that fused layers compute, without drafts.
      take_over: True deletes the model's layers once the engine has its own copies. Dense weights then need memory once instead
        of twice; the model is unusable afterwards.
      lazy: True compiles a program when a request first needs it, while all others wait. Unneeded programs are never compiled.

    Raises:
      ValueError: no model, or no `EngineLimits`; positions that scale with the longest text of a batch (rope type "dynamic").
        Also drafts of a module that is missing, or without room for all drafts of each sequence in a step. Also `strict` with
        drafts, adapters or quantised weights, or with a model that its kernels do not support. For a model on several devices
        also drafts and adapters. Also more replicas than devices allow. Also `max_adapters` with a drafting module, or with an
        adapter of the model's own.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        limits: EngineLimits | None = None,
        tokenizer: Any | None = None,
        keep_experts: bool = False,
        drafts: int | str = 0,
        strict: bool = False,
        take_over: bool = False,
        lazy: bool = False,
    ):
        limits = EngineLimits() if limits is None else limits
        source = check_servable(model, limits, drafts=drafts, strict=strict)
        self.tokenizer = tokenizer
        self.limits = limits
        self.config = model.config
        ends = generation_config(model.source, model.config).get("eos_token_id")
        self._ends = frozenset([] if ends is None else np.atleast_1d(ends).tolist())
        self._keeps_experts = keep_experts and model.config.experts is not None
        self.lazy = lazy
        self._adapters, self._source = AdapterTable(limits.max_adapters), model.source
        own, *others = Placement.of_replicas(model, limits.replicas)
        modules = int(source.name == "module")
        parts = take_apart(model, drafts=modules, take_over=take_over, mesh=own.mesh, strict=strict)
        options: dict[str, Any] = dict(keep_experts=keep_experts, drafts=source, lazy=lazy)
        devices = [Device(parts, own, limits, **options)]
        holders = jax.tree.leaves(nnx.state(model))[0].sharding.device_set
        devices += [Device(parts, each, limits, owns_weights=holders.isdisjoint(each.devices), **options) for each in others]
        for device in devices:
            device.warm_up()

        def queues() -> list[EngineQueues]:
            return [EngineQueues(limits, source.num, source.name == "lookup") for _ in own.devices]

        self._loop: EngineLoop | Replicas
        if others:
            self._loop = Replicas([(device, queues()) for device in devices], limits)
        else:
            self._loop = EngineLoop(devices[0], queues(), name=None if own.mesh is None else own.name)
        # The thread would keep an unreachable engine's memory, for example after a notebook's variable is reassigned.
        weakref.finalize(self, self._loop.begin_to_close, drain=False).atexit = False

    def generate(
        self, prompts: Many[Many[int]], options: SamplingOptions | Many[SamplingOptions] = GREEDY
    ) -> list[list[Completion]]:
        """Continues all prompts, and returns their completions: for each prompt `n` of them. The queue has no limit here.

        If an exception such as Ctrl-C interrupts the call, its requests are aborted.

        Args:
          options: one for all prompts, or one for each.

        Raises:
          ValueError: a prompt or its options are wrong; nothing was computed then.
          RuntimeError: the engine failed, sleeps or was closed, or the model's arrays were deleted.
        """
        found = dict(self.as_completed(prompts, options))
        return [found[index] for index in range(len(prompts))]

    def as_completed(
        self, prompts: Many[Many[int]], options: SamplingOptions | Many[SamplingOptions] = GREEDY
    ) -> Iterator[tuple[int, list[Completion]]]:
        """Does the same as `generate`, and yields (index, completions) of each prompt as soon as its last one has ended.

        Requests start together at the first `next`. Those that have not ended are aborted if the iterator is closed.
        """
        check_prompts(prompts)
        each = list(options) if isinstance(options, Many) else [options] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"options must be one for all prompts, or one for each of {len(prompts)}; got {len(each)}")
        ids = [self._checked(prompt, of_prompt) for prompt, of_prompt in zip(prompts, each, strict=True)]
        requests = [self._request(*pair) for pair in zip(ids, each, strict=True)]
        handles = [handle for handle, _ in requests]
        try:
            # All at once: else the requests of a step, and so rounding, would depend on the speed of this thread.
            self._add([sequences for _, sequences in requests], limited=False)
            yield from as_completed(handles)
        except BaseException:
            # No other code has these handles.
            for handle in handles:
                handle.abort()
            raise

    def submit(self, prompt: Many[int], options: SamplingOptions = GREEDY) -> Handle:
        """Adds a request and returns at once.

        Raises:
          ValueError: the prompt or the options are wrong, or exceed the engine's limits; all problems are listed.
          QueueFull: too many requests wait.
          RuntimeError: the engine failed, sleeps or was closed, or the model's arrays were deleted.
        """
        handle, sequences = self._request(self._checked(prompt, options), options)
        self._add([sequences], limited=True)
        return handle

    def chat(
        self,
        messages: str | Many[Mapping[str, Any]],
        options: SamplingOptions = GREEDY,
        *,
        tools: Many[Mapping[str, Any]] = (),
        tool_choice: Any = "auto",
        template_options: Mapping[str, Any] | None = None,
    ) -> list[Reply]:
        """Answers a conversation; returns `options.n` answers, each split into thought, text and tool calls.

        An answer also ends at the token that the chat template puts after answers. `options.grammar` is the grammar of its
        text, after a thought.

        Args:
          messages: {"role": ..., "content": ...} of each message, or the text of a user's only message.
          tools: functions that the model may call, as {"type": "function", "function": {"name": ..., "parameters": ...}}.
          tool_choice: auto, none, required, or {"type": "function", "function": {"name": ...}}.
          template_options: further values for the chat template.

        Raises:
          ValueError: the engine has no tokenizer; the conversation, the tools or the options are wrong.
          QueueFull, RuntimeError: as in `submit`.
        """
        if self.tokenizer is None:
            raise ValueError("chat needs Engine(..., tokenizer=...)")
        messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        request = ChatRequest(messages, tools, tool_choice, values=template_options or {}, grammar=options.grammar)
        prepared = prepare(self.tokenizer, request, lambda: self.grammars)
        ends = () if options.ignore_eos else tuple(ends_of_answers(self.tokenizer))
        options = replace(prepared.options(options), stop_token_ids=(*options.stop_token_ids, *ends))
        return [reply_of(each, prepared.parts()) for each in self.submit(prepared.tokens, options).result()]

    def pause(self) -> None:
        """Starts no further step until `resume`. Requests keep their pages, and more may be submitted."""
        self._loop.pause(True)

    def resume(self) -> None:
        """Ends a `pause`."""
        self._loop.pause(False)

    def update(self, model: Decoder) -> None:
        """Computes with another model's weights from the next step on; cached pages of the old weights never match again.

        Running requests continue, with the old weights' keys and values of their earlier tokens. An engine that sleeps wakes.

        Raises:
          ValueError: no model, or one with another config or dtype than the engine's, another form of weights, or an adapter
            of another shape. The error names the first difference.
        """
        check_model(model)
        self._loop.update(model)

    def load_adapter(self, name: str, adapter: str | Path | Decoder) -> None:
        """Loads an adapter (LoRA), which requests with `SamplingOptions(adapter=name)` use from then on.

        Rows of any adapters, and rows without one, share a step; nothing is compiled. No two adapters share a cached page. If
        the name has an adapter already, requests that use it continue with it, and later ones use the new adapter. The least
        recently used adapter that no request uses makes room for a new one.

        Args:
          adapter: a folder, a hub id, or a model with an adapter. It may change only projections of attention.

        Raises:
          FileNotFoundError, ValueError: as `adapters.load_adapter`. Also an empty name, an adapter that changes more than
            attention, a rank above `EngineLimits.max_adapter_rank`, or `EngineLimits(max_adapters=0)`.
          RuntimeError: running requests use all places; or the engine failed or was closed.
        """
        if not self.limits.max_adapters:
            raise ValueError("load_adapter needs an engine with EngineLimits(max_adapters=...) of at least 1; it has 0")
        if not isinstance(name, str) or not name:
            raise ValueError(f"name must be a text, not empty; got {name!r}")
        stacks = read_stacks(self.config, adapter, self.limits.max_adapter_rank, self._source)
        source = "a model" if isinstance(adapter, Decoder) else str(adapter)
        with self._adapters.lock:
            in_use = {sequence.adapter for sequence in self._loop.opened}
            with self._adapters.placed(name, source, in_use) as placed:
                self._loop.on_each(lambda loop: loop.device.write_adapter(placed.number, stacks))

    def unload_adapter(self, name: str) -> None:
        """Forgets an adapter. Requests that use it continue; its place is free when they have ended.

        Raises:
          ValueError: there is no adapter of this name.
        """
        with self._adapters.lock:
            self._adapters.forget(self._adapters.find(name).name)

    @property
    def adapters(self) -> list[NamedAdapter]:
        """The loaded adapters, by name."""
        return self._adapters.adapters

    def temper_logprobs(self) -> None:
        """Computes log-probabilities of new tokens from logits / temperature from now on, as tokens are drawn.

        At temperature 0, and for prompt tokens, they are computed from the logits themselves.
        """
        self._loop.on_each(lambda loop: setattr(loop.device, "is_tempered", True))

    def drop_prefixes(self) -> None:
        """Forgets cached prompts, so that later requests share no pages with earlier ones. Running requests continue."""
        self._loop.on_each(lambda loop: loop.drop_prefixes())

    def sleep(self) -> None:
        """Frees pages and the engine's copies of weights until `update`. Compiled programs stay, so nothing is compiled again.

        New requests are refused meanwhile. Training may donate the model's arrays.

        Raises:
          RuntimeError: requests run or wait, or the engine failed or was closed. The engine has not changed then.
        """
        self._loop.sleep()

    @property
    def capacity(self) -> int:
        """The number of sequences that `submit` lets run or wait at one time, on all devices."""
        return self._loop.capacity

    @property
    def failed(self) -> bool:
        """True once the device or the engine's thread has failed: all requests have ended, and no more are accepted.

        Errors of later calls name the cause. An engine whose model's arrays were deleted has not failed.
        """
        return self._loop.failed

    def stats(self) -> Stats:
        """Returns the present state."""
        return self._loop.stats()

    def stats_of_devices(self) -> dict[str, Stats]:
        """Returns the present state of each of several replicas, by device; empty without replicas."""
        return self._loop.stats_of_devices() if isinstance(self._loop, Replicas) else {}

    def close(self, *, drain: bool = True) -> None:
        """Ends the engine: after all requests if `drain`, else aborts them.

        Pages and copies of weights are freed before it returns. Later requests get an error; `stats` keeps its last numbers.
        """
        self._loop.close(drain=drain)

    def _checked(self, prompt: Many[int], options: SamplingOptions) -> list[int]:
        ids = checked(prompt, options, self.limits, self.config.vocab_size)
        if options.return_experts and not self._keeps_experts:
            raise ValueError("return_experts needs a model with experts and Engine(..., keep_experts=True)")
        for name, needs in (("stop", "stop texts need"), ("bad_words", "bad_words need"), ("grammar", "a grammar needs")):
            if getattr(options, name) and self.tokenizer is None:
                raise ValueError(f"{needs} Engine(..., tokenizer=...)")
        if options.adapter is not None:
            with self._adapters.lock:
                self._adapters.find(options.adapter)
        warn_of_length(self.config, len(ids), options.max_new_tokens)
        return ids

    def _add(self, requests: list[list[Sequence]], *, limited: bool) -> None:
        """Adds requests to the loop, with the adapters that they name."""
        adapted = [(each, name) for each in itertools.chain(*requests) if (name := each.options.adapter) is not None]
        # Else an adapter could lose its place after a request has found it. Others need not wait while one is loaded.
        with self._adapters.lock if adapted else contextlib.nullcontext():
            for sequence, name in adapted:
                sequence.adapter = self._adapters.find(name)
            self._loop.add(requests, limited=limited)

    def _request(self, prompt: list[int], options: SamplingOptions) -> tuple[Handle, list[Sequence]]:
        """Returns the handle of a request, and its sequences, not yet added to the loop."""
        ends = frozenset(options.stop_token_ids) | (frozenset() if options.ignore_eos else self._ends)
        handle = Handle(prompt, options, lambda numbers: self._loop.abort([sequences[i] for i in numbers]), self.tokenizer)
        sequences = [Sequence(prompt, options, seed, ends, index, handle) for index, seed in enumerate(seeds_of(options))]
        if is_constrained(options):
            bad_words = bad_word_tokens(self.tokenizer, options.bad_words)
            for sequence in sequences:
                matcher = None if options.grammar is None else self.grammars.matcher(options.grammar)
                sequence.constraint = Constraint(options, ends, self.config.vocab_size, bad_words, matcher)
        return handle, sequences

    @functools.cached_property
    def grammars(self) -> Grammars:
        """The compiled grammars of requests. Its first use reads the vocabulary, which takes about a second.

        Raises:
          ValueError: llguidance is not installed, or does not support the tokenizer.
        """
        return Grammars(self.tokenizer, self.config.vocab_size)


def check_servable(model: Decoder, limits: EngineLimits, *, drafts: int | str, strict: bool) -> DraftSource:
    """Checks that an engine of these limits can serve the model; returns the source of its drafts. Arguments as in `Engine`.

    Raises:
      ValueError: it cannot; the message gives the reason.
    """
    check_model(model)
    if not isinstance(limits, EngineLimits):
        raise ValueError(f"limits must be EngineLimits; got {limits!r}")
    check_config(model.config, limits.kv_dtype)
    if limits.kv_dtype == "fp8" and model.dtype == jnp.float16:
        raise ValueError('kv_dtype="fp8" needs a model in bfloat16 or float32; got float16')
    if model.precision and not _has_experts_in_fp8(model):
        raise ValueError(
            "an engine with precision 'fp8' would round the experts' weights in every step: load the model with weights='fp8'"
        )
    if model.precision and model.precision.dense:
        raise ValueError(
            f"an engine computes dense matrices in the model's dtype, not in FP8; got dense={model.precision.dense!r}: use "
            "set_precision('fp8')"
        )
    devices = Placement.of_replicas(model, limits.replicas)[0].devices
    if len(devices) > 1:
        _check_several(model, len(devices), drafts=drafts)
    source = check_drafting(drafts, model.config, limits)
    if limits.max_adapters:
        _check_adapters(model, len(devices), source, limits, strict)
    if strict:
        from moe_jax.serving.fused import check_strict  # imports Pallas Mosaic GPU

        check_strict(model)
        if drafts:
            raise ValueError(f"strict=True needs drafts=0; got drafts={drafts!r}")
    return source


def _check_adapters(model: Decoder, num_devices: int, source: DraftSource, limits: EngineLimits, strict: bool) -> None:
    reasons = {
        "strict=True: strict bits are those of the weights alone; merge the adapter (adapters.merge_adapter)": strict,
        "drafts of a module, which has no adapter: use drafts='lookup:3'": source.name == "module",
        "a model that has an adapter of its own: merge it (adapters.merge_adapter)": has_adapters(model),
        "a model on several devices: use replicas on one device each": num_devices > 1,
    }
    if wrong := [reason for reason, is_met in reasons.items() if is_met]:
        raise ValueError(f"max_adapters={limits.max_adapters} does not support {'; or '.join(wrong)}")


def check_model(model: Any) -> None:
    """Refuses values other than a model, such as its folder, and a model whose arrays were deleted.

    Raises:
      ValueError: the value is not a model, or its arrays were deleted.
    """
    if not isinstance(model, Decoder):
        # Without its repr: users may pass the state with all of a model's arrays by mistake.
        raise ValueError(f"model must be a Decoder, as moe_jax.from_pretrained(folder) returns; got {type(model).__name__}")
    refuse_deleted(nnx.state(model))


def check_config(config: ModelConfig, kv_dtype: KvDtype = "model") -> None:
    """Refuses an architecture that no engine can serve, before weights are read.

    Raises:
      ValueError: positions scale with the longest text of a batch, or layers are recurrent or of a repeated pattern. Or pages
        in FP8 would hold latents.
    """
    if (reason := config.mixer_refusal("an engine")) is not None:
        raise ValueError(f"{reason}; generate without an engine (moe_jax.generate)")
    if any(len(stage.body) > 1 for stage in config.stages):
        raise ValueError(
            "an engine needs all layers of a stage to be of one kind; this model repeats a pattern of several kinds"
        )
    if config.rope_parameters.rope_type == "dynamic":
        raise ValueError(
            'with rope type "dynamic" all tokens of a batch get the longest sequence\'s frequencies; an engine cannot serve it'
        )
    if kv_dtype == "fp8" and config.mixer.latent_value_dim is not None:
        raise ValueError('kv_dtype="fp8" needs keys and values; pages of this model hold latents: use kv_dtype="model"')


def check_drafting(drafts: int | str, config: ModelConfig, limits: EngineLimits) -> DraftSource:
    """Checks that an engine of these limits can draft, and returns the source of its drafts.

    Raises:
      ValueError: drafts names no source; the model has no drafting module; or max_tokens_per_step leaves no room for drafts.
    """
    source = draft_source(drafts)
    if source.num:
        check_drafts(config, source)
        if limits.max_tokens_per_step < (1 + source.num) * limits.max_sequences:
            raise ValueError(
                f"with drafts={drafts!r} max_tokens_per_step must be at least {1 + source.num} times max_sequences; "
                f"got {limits.max_tokens_per_step} and {limits.max_sequences}"
            )
    return source


def _check_several(model: Decoder, num_devices: int, *, drafts: int | str) -> None:
    refuse_chunks(nnx.state(model, nnx.Param), "an engine")
    if any(not leaf.is_fully_addressable for leaf in jax.tree.leaves(nnx.state(model))):
        raise ValueError("an engine computes in one process; the model's devices belong to several")
    options = {"drafts": bool(drafts), "adapters": has_adapters(model)}
    if wrong := [name for name, is_set in options.items() if is_set]:
        raise ValueError(f"an engine on several devices does not support {', '.join(wrong)}; the model is on {num_devices}")


def _has_experts_in_fp8(model: Decoder) -> bool:
    experts = [module for _, module in nnx.iter_modules(model) if isinstance(module, Experts)]
    matrices = [variable.get_value() for each in experts for variable in (each.gate_up_proj, each.down_proj)]
    return all(isinstance(each, BlockScaled) and each.block == FP8_BLOCK for each in matrices)
