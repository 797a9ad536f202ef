"""The engine: many requests at once on one model, each as if it were alone.

A thread plans a step, starts it on the device, and only then reads the tokens of the step before: host and device work at the
same time. A sequence that ends is found one step late, which costs one row of one step.
"""

import logging
import queue
import threading
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

from moe_jax.checkpoint.companions import generation_config
from moe_jax.models.decoder import Decoder
from moe_jax.serving.device import Device, Launched
from moe_jax.serving.handle import Event, Handle, Listener, wake
from moe_jax.serving.limits import EngineLimits
from moe_jax.serving.queues import Queues, change_weights, finish
from moe_jax.serving.records import Record, completion_of
from moe_jax.serving.request import Completion, SamplingOptions, checked, seeds_of
from moe_jax.serving.schedule import plan_step, read_step
from moe_jax.serving.sequence import Sequence

GREEDY = SamplingOptions()

_logger = logging.getLogger(__name__)


class QueueFull(Exception):
    """The engine has as many requests as `EngineLimits.max_waiting` lets wait."""


class Stats(NamedTuple):
    """The state of an engine."""

    running: int
    waiting: int
    free_pages: int
    cached_pages: int
    owned_pages: int
    num_steps: int
    num_tokens: int
    """New tokens so far."""
    num_preemptions: int
    weights_version: int


class Engine:
    """Continues many prompts at once on one device, with a token of each in every step.

        engine = Engine(moe_jax.from_pretrained(path))
        completions = engine.generate(prompts, SamplingOptions(max_new_tokens=100))
        for event in engine.submit(prompt, SamplingOptions(temperature=0.7)).events(): ...

    All programs are compiled before the constructor returns. Methods may be called from any thread.

    Args:
      model: any model of this library, on one device. The engine reads experts where the model keeps them.
      limits: sizes, which set the engine's memory; default: `EngineLimits()`.
      keep_experts: True makes room for each token's experts, for requests with `return_experts`.

    Raises:
      ValueError: the model lies on several devices, or in the chunks of a pipeline, or its positions scale with the longest
        sequence of a batch (rope type "dynamic").
    """

    def __init__(self, model: Decoder, *, limits: EngineLimits | None = None, keep_experts: bool = False):
        limits = EngineLimits() if limits is None else limits
        _check_model(model)
        self.limits = limits
        self.config = model.config
        ends = generation_config(model.source, model.config).get("eos_token_id")
        self._ends = frozenset([] if ends is None else np.atleast_1d(ends).tolist())
        self._keeps_experts = keep_experts and model.config.experts is not None
        self._device = Device(model, limits, keep_experts=keep_experts)
        self._device.warm_up()
        self._queues = Queues(limits)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._open: set[Sequence] = set()
        self._open_lock = threading.Lock()
        self._paused = self._closing = False
        self._num_steps = self._num_tokens = 0
        self._error: BaseException | None = None
        self._listeners: set[Listener] = set()
        self._thread = threading.Thread(target=self._run, name="moe_jax engine", daemon=True)
        self._thread.start()

    def generate(
        self, prompts: Many[Many[int]], options: SamplingOptions | Many[SamplingOptions] = GREEDY
    ) -> list[list[Completion]]:
        """Continues all prompts, and returns their completions: for each prompt `n` of them. The queue has no limit here.

        Args:
          options: of all prompts, or of each.

        Raises:
          ValueError: a prompt or its options are wrong; nothing was computed then.
          RuntimeError: the engine failed or was closed.
        """
        each = [options] * len(prompts) if isinstance(options, SamplingOptions) else list(options)
        if len(each) != len(prompts):
            raise ValueError(f"options must be one for all prompts, or one for each of {len(prompts)}; got {len(each)}")
        ids = [self._checked(prompt, of_prompt) for prompt, of_prompt in zip(prompts, each, strict=True)]
        handles = [self._submit(*pair, limited=False) for pair in zip(ids, each, strict=True)]
        return [handle.result() for handle in handles]

    def submit(self, prompt: Many[int], options: SamplingOptions = GREEDY) -> Handle:
        """Adds a request and returns at once.

        Raises:
          ValueError: the prompt or the options are wrong, or exceed the engine's limits; all problems are listed.
          QueueFull: too many requests wait.
          RuntimeError: the engine failed or was closed.
        """
        return self._submit(self._checked(prompt, options), options, limited=True)

    def pause(self) -> None:
        """Starts no further step until `resume`. Requests keep their pages, and more may be submitted."""
        self._call(lambda: setattr(self, "_paused", True))

    def resume(self) -> None:
        """Goes on after `pause`."""
        self._call(lambda: setattr(self, "_paused", False))

    def update(self, model: Decoder) -> None:
        """Computes with another model's weights from the next step on; cached pages of the old weights never match again.

        Requests that run go on, with the keys and values that the old weights gave their earlier tokens.

        Raises:
          ValueError: the model has another config or dtype than the engine's.
        """

        def replace() -> None:
            self._device.replace_weights(model)
            change_weights(self._queues)

        self._call(replace)

    def stats(self) -> Stats:
        """Returns the present state."""
        queues = self._queues
        pages = queues.pool.counts()
        return Stats(
            running=len(queues.running),
            waiting=len(queues.waiting),
            free_pages=pages.free,
            cached_pages=pages.cached,
            owned_pages=pages.owned,
            num_steps=self._num_steps,
            num_tokens=self._num_tokens,
            num_preemptions=queues.num_preemptions,
            weights_version=queues.weights_version,
        )

    def close(self, *, drain: bool = True) -> None:
        """Ends the engine: after all requests with `drain`, else aborts them."""

        def end() -> None:
            self._closing, self._paused = True, False
            if not drain:
                for sequence in [*self._queues.running, *self._queues.waiting]:
                    self._end(sequence, "abort")

        if self._thread.is_alive():
            self._commands.put(end)
            self._thread.join()

    def _checked(self, prompt: Many[int], options: SamplingOptions) -> list[int]:
        ids = checked(prompt, options, self.limits, self.config.vocab_size)
        if options.return_experts and not self._keeps_experts:
            raise ValueError("return_experts needs a model with experts and Engine(..., keep_experts=True)")
        return ids

    def _submit(self, prompt: list[int], options: SamplingOptions, *, limited: bool) -> Handle:
        ends = frozenset(options.stop_token_ids) | (frozenset() if options.ignore_eos else self._ends)
        handle = Handle(prompt, options.n, lambda: self._commands.put(lambda: abort()))
        sequences = [
            Sequence(prompt, options, seed, ends, index, owner=Record(handle)) for index, seed in enumerate(seeds_of(options))
        ]

        def abort() -> None:
            for sequence in sequences:
                self._end(sequence, "abort")

        with self._open_lock:
            # Under the lock: a request that comes later than the failure would wait for ever.
            if self._error is not None:
                raise RuntimeError("the engine failed") from self._error
            if self._closing or not self._thread.is_alive():
                raise RuntimeError("the engine is closed")
            room = self.limits.max_waiting + self.limits.max_sequences - len(self._open)
            if limited and options.n > room:
                raise QueueFull(f"{len(self._open)} sequences run or wait; the engine has room for {room} more")
            self._open.update(sequences)
        self._commands.put(lambda: self._queues.waiting.extend(sequences))
        return handle

    def _call[T](self, function: Callable[[], T]) -> T:
        """Runs a function in the engine's thread, between two steps, and returns its result."""
        done: queue.SimpleQueue[Callable[[], T]] = queue.SimpleQueue()

        def run() -> None:
            try:
                result = function()
            except Exception as error:  # raised again where the caller waits
                failure = error
                done.put(lambda: _raise(failure))
            else:
                done.put(lambda: result)

        if not self._thread.is_alive():
            raise RuntimeError("the engine is closed")
        self._commands.put(run)
        return done.get()()

    def _run(self) -> None:
        """The engine's thread."""
        try:
            in_flight: Launched | None = None
            while not (self._closing and in_flight is None and not self._queues.running and not self._queues.waiting):
                is_idle = in_flight is None and (self._paused or not (self._queues.running or self._queues.waiting))
                self._run_commands(wait=is_idle)
                launched = None if self._paused else self._launch_next()
                if in_flight is not None:
                    self._read(in_flight)
                in_flight = launched
                wake(self._listeners)
                self._listeners.clear()
        except BaseException as error:  # whatever it was, nobody may wait for ever
            _logger.exception("the engine failed")
            with self._open_lock:
                self._error = error
                listeners = {sequence.owner.handle.fail(error) for sequence in self._open}
            wake({listener for listener in listeners if listener is not None})

    def _run_commands(self, *, wait: bool) -> None:
        if wait:
            self._commands.get()()
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _launch_next(self) -> Launched | None:
        plan = plan_step(self._queues)
        if plan.is_empty:
            return None
        self._num_steps += 1
        for chunk in plan.chunks:
            chunk.sequence.owner.started(self._queues.weights_version)
        return self._device.launch(plan)

    def _read(self, launched: Launched) -> None:
        """Waits for the tokens of a step, and gives them to their requests."""
        tokens, logprobs, top_tokens, top_logprobs = (np.asarray(a)[launched.rows] for a in launched.sampled)
        samples = launched.plan.samples
        pages = {i: list(one.pages) for i, one in enumerate(samples) if one.options.return_experts}
        taken = read_step(self._queues, launched.plan, tokens.tolist())
        self._num_tokens += len(taken)
        logprob_list = logprobs.tolist()
        for i in taken:
            sequence = samples[i]
            record: Record = sequence.owner
            tops = None
            if wanted := sequence.options.logprobs:
                tops = dict(zip(top_tokens[i, :wanted].tolist(), top_logprobs[i, :wanted].tolist(), strict=True))
            record.add(logprob_list[i], tops)
            if sequence.finish_reason is not None:
                if sequence.options.return_experts:
                    record.experts = self._device.experts_of(pages[i], len(sequence.tokens) - 1)
                self._close_record(sequence)
            self._deliver(sequence, sequence.tokens[-1], logprob_list[i], tops)

    def _end(self, sequence: Sequence, reason) -> None:
        """Ends a sequence without another token, if it has not ended."""
        if sequence.finish_reason is None:
            finish(self._queues, sequence, reason)
            self._close_record(sequence)
            self._deliver(sequence, None, None, None)

    def _close_record(self, sequence: Sequence) -> None:
        sequence.owner.handle.completions[sequence.index] = completion_of(sequence)
        with self._open_lock:
            self._open.discard(sequence)

    def _deliver(self, sequence: Sequence, token: int | None, logprob: float | None, tops: dict[int, float] | None) -> None:
        wants_logprob = sequence.options.logprobs is not None
        event = Event(sequence.index, token, logprob if wants_logprob else None, tops, sequence.finish_reason)
        listener = sequence.owner.handle.deliver(event)
        if listener is not None:
            self._listeners.add(listener)


def _check_model(model: Decoder) -> None:
    if model.config.rope_parameters.rope_type == "dynamic":
        raise ValueError(
            'rope type "dynamic" gives all tokens of a batch the frequencies of the longest sequence; an engine cannot serve it'
        )
    devices = {device for leaf in jax.tree.leaves(nnx.state(model)) for device in leaf.sharding.device_set}
    if len(devices) > 1:
        raise ValueError(f"an engine computes on one device; the model lies on {len(devices)}")


def _raise(error: Exception):
    raise error
