"""The engine: many requests at once on one model, each as if it were alone."""

import weakref
from collections.abc import Sequence as Many
from typing import Any

import numpy as np

from moe_jax.checkpoint.companions import generation_config
from moe_jax.generation.request import warn_of_length
from moe_jax.models.decoder import Decoder
from moe_jax.serving.delivery import Record
from moe_jax.serving.device import Device
from moe_jax.serving.handle import Handle, results
from moe_jax.serving.limits import EngineLimits
from moe_jax.serving.loop import EngineLoop, Stats, stats_of
from moe_jax.serving.queues import EngineQueues, change_weights
from moe_jax.serving.request import Completion, SamplingOptions, check_prompts, checked, seeds_of
from moe_jax.serving.sequence import Sequence
from moe_jax.serving.servable import check_model, check_servable

GREEDY = SamplingOptions()


class Engine:
    """Continues many prompts at once, with a token of each in every step.

        engine = Engine(moe_jax.from_pretrained(path))
        completions = engine.generate(prompts, SamplingOptions(max_new_tokens=100))
        for event in engine.submit(prompt, SamplingOptions(temperature=0.7)).events(): ...

    All programs are compiled before the constructor returns, unless `lazy`. Methods may be called from any thread.

    The engine reads the model's experts and embedding where they are. A training step that donates them ends all requests with
    an error that tells so, and `update` revives the engine.

    Args:
      model: any model of this library, with an adapter beside its weights or without. The engine computes on all devices that
        hold it, each with prompts of its own. On one device it reads experts where the model keeps them.
      limits: sizes of each device, which set its memory; default: `EngineLimits()`.
      tokenizer: a Hugging Face tokenizer, with which events and completions have text, and stop texts end them.
      keep_experts: True makes room for each token's experts, for requests with `return_experts`.
      drafts: 1 drafts a token a step with the model's module that predicts further tokens (`serving.drafts`). A step then gives
        a sequence one token or two, and costs more. Tokens are the same but for rounding.
      strict: True gives a token bits that depend on its own sequence alone, those of `strict_log_probs`. For Qwen3 and
        Qwen3-MoE without drafts.
      take_over: True deletes the model's layers once the engine has its own copies. A dense model then needs its memory once
        and not twice, and is unusable afterwards.
      lazy: True compiles a program when a request first needs it, while all others wait. Fewer are compiled if few kinds come.

    Raises:
      ValueError: no model, or no `EngineLimits`; positions that scale with the longest text of a batch (rope type "dynamic").
        Also drafts without such a module, or without room for two tokens of each sequence in a step. Also `strict` with drafts,
        an adapter or quantised weights, or with a model that its kernels do not take. On several devices also drafts, `strict`
        and adapters.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        limits: EngineLimits | None = None,
        tokenizer: Any | None = None,
        keep_experts: bool = False,
        drafts: int = 0,
        strict: bool = False,
        take_over: bool = False,
        lazy: bool = False,
    ):
        limits = EngineLimits() if limits is None else limits
        check_servable(model, limits, drafts=drafts, strict=strict)
        self.tokenizer = tokenizer
        self.limits = limits
        self.config = model.config
        ends = generation_config(model.source, model.config).get("eos_token_id")
        self._ends = frozenset([] if ends is None else np.atleast_1d(ends).tolist())
        self._keeps_experts = keep_experts and model.config.experts is not None
        self.lazy = lazy
        options: dict[str, Any] = dict(keep_experts=keep_experts, take_over=take_over, drafts=drafts, strict=strict, lazy=lazy)
        device = Device(model, limits, **options)
        device.warm_up()
        self._loop = EngineLoop(device, [EngineQueues(limits, drafts) for _ in device.placement.devices])
        # The thread would keep the memory of an engine that nobody can reach any more, such as one in a notebook's variable.
        weakref.finalize(self, self._loop.begin_to_close, drain=False).atexit = False

    def generate(
        self, prompts: Many[Many[int]], options: SamplingOptions | Many[SamplingOptions] = GREEDY
    ) -> list[list[Completion]]:
        """Continues all prompts, and returns their completions: for each prompt `n` of them. The queue has no limit here.

        A call that is left by an exception, such as Ctrl-C in a notebook, aborts its requests.

        Args:
          options: of all prompts, or of each.

        Raises:
          ValueError: a prompt or its options are wrong; nothing was computed then.
          RuntimeError: the engine failed or was closed, or the model's arrays were deleted.
        """
        check_prompts(prompts)
        each = list(options) if isinstance(options, Many) else [options] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"options must be one for all prompts, or one for each of {len(prompts)}; got {len(each)}")
        ids = [self._checked(prompt, of_prompt) for prompt, of_prompt in zip(prompts, each, strict=True)]
        requests = [self._request(*pair) for pair in zip(ids, each, strict=True)]
        handles = [handle for handle, _ in requests]
        try:
            for _, sequences in requests:
                self._loop.add(sequences, limited=False)
            return results(handles)
        except BaseException:
            # Nobody else could: the handles are known here alone.
            for handle in handles:
                handle.abort()
            raise

    def submit(self, prompt: Many[int], options: SamplingOptions = GREEDY) -> Handle:
        """Adds a request and returns at once.

        Raises:
          ValueError: the prompt or the options are wrong, or exceed the engine's limits; all problems are listed.
          QueueFull: too many requests wait.
          RuntimeError: the engine failed or was closed, or the model's arrays were deleted.
        """
        handle, sequences = self._request(self._checked(prompt, options), options)
        self._loop.add(sequences, limited=True)
        return handle

    def pause(self) -> None:
        """Starts no further step until `resume`. Requests keep their pages, and more may be submitted."""
        self._set_paused(True)

    def resume(self) -> None:
        """Goes on after `pause`."""
        self._set_paused(False)

    def update(self, model: Decoder) -> None:
        """Computes with another model's weights from the next step on; cached pages of the old weights never match again.

        Requests that run go on, with the keys and values that the old weights gave their earlier tokens.

        Raises:
          ValueError: no model, or one with another config or dtype than the engine's, another form of weights, or an adapter
            of another shape. The error names the first difference.
        """

        check_model(model)
        loop = self._loop

        def replace() -> None:
            loop.device.replace_weights(model)
            for queues in loop.queues:
                change_weights(queues)

        loop.call(replace)

    @property
    def capacity(self) -> int:
        """The number of sequences that `submit` lets run or wait at one time, on all devices."""
        return self._loop.capacity

    @property
    def failed(self) -> bool:
        """True once the device or the engine's thread has failed: all requests have ended, and none is taken again.

        Errors of later calls name the cause. An engine whose model's arrays were deleted has not failed.
        """
        return self._loop.failed

    def stats(self) -> Stats:
        """Returns the present state."""
        return stats_of(self._loop)

    def close(self, *, drain: bool = True) -> None:
        """Ends the engine: after all requests with `drain`, else aborts them.

        Pages and copies of weights are freed before it returns. Later requests get an error; `stats` keeps its last numbers.
        """
        self._loop.close(drain=drain)

    def _set_paused(self, paused: bool) -> None:
        self._loop.call(lambda: setattr(self._loop, "is_paused", paused))

    def _checked(self, prompt: Many[int], options: SamplingOptions) -> list[int]:
        ids = checked(prompt, options, self.limits, self.config.vocab_size)
        if options.return_experts and not self._keeps_experts:
            raise ValueError("return_experts needs a model with experts and Engine(..., keep_experts=True)")
        if options.stop and self.tokenizer is None:
            raise ValueError("stop texts need Engine(..., tokenizer=...)")
        warn_of_length(self.config, len(ids), options.max_new_tokens)
        return ids

    def _request(self, prompt: list[int], options: SamplingOptions) -> tuple[Handle, list[Sequence]]:
        """Returns the handle of a request, and its sequences, which the loop does not know yet."""
        ends = frozenset(options.stop_token_ids) | (frozenset() if options.ignore_eos else self._ends)
        handle = Handle(prompt, options, lambda numbers: self._loop.abort([sequences[i] for i in numbers]), self.tokenizer)
        # The first continuation scores the prompt for all.
        scores: list[dict[int, float] | None] = [None]
        sequences = [
            Sequence(prompt, options, seed, ends, index, owner=Record(handle, scores))
            for index, seed in enumerate(seeds_of(options))
        ]
        return handle, sequences
