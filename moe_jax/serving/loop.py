"""The engine's thread: it plans a step, starts it on the device, and only then reads the tokens of the step before.

So host and device work at the same time. A sequence that ends is found one step late, which costs one row of one step. Tokens
of a step with constraints are drawn after the step before was read (`constraints`). Only this thread changes the engine's
state: other threads pass it functions to run between two steps.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from moe_jax.models.decoder import Decoder
from moe_jax.serving.device import Device, Launched
from moe_jax.serving.handle import Listener, ReplicaFailed, WeightsDeleted, wake, why
from moe_jax.serving.request import Completion, DrawnToken
from moe_jax.serving.schedule import EngineQueues, Sequence, change_weights, drop_prefixes, finish, plan_step, read_step
from moe_jax.serving.weights import Weights

_logger = logging.getLogger(__name__)

LONGEST_STEP = 120.0
"""Seconds after which a group's step counts as failed: a device waits forever for one that does not start the step."""


class QueueFull(Exception):
    """The number of waiting requests has reached `EngineLimits.max_waiting`."""


class Stats(NamedTuple):
    """The state of an engine, summed over its devices."""

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
    num_drafted: int
    """Drafts that were checked so far (`Engine(drafts=)`)."""
    num_accepted: int
    """Drafts accepted so far: each yielded a token without its own step."""

    @property
    def acceptance_rate(self) -> float:
        """The accepted share of the drafts; 0 without any."""
        return self.num_accepted / max(self.num_drafted, 1)


class EngineLoop:
    """The scheduler thread, and the engine's state that only this thread may change.

    Attributes:
      device: changed only by the thread, like the queues; other threads may read their counters.
      queues: one for each device.
      is_paused: True while no step may start.
      is_asleep: True while the device has neither weights nor pages.
      name: the names of its devices, for errors, if the engine has several.

    Args:
      refill: called between two steps, and after an error has ended the thread; it may add sequences.
    """

    def __init__(
        self,
        device: Device,
        queues: list[EngineQueues],
        *,
        name: str | None = None,
        refill: Callable[[], None] = lambda: None,
    ):
        self.device = device
        self.name, self._refill = name, refill
        self.queues = queues
        self.is_paused = self.is_asleep = self._is_stuck = False
        self._num_steps = self._num_tokens = self._num_drafted = self._num_accepted = 0
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._open: set[Sequence] = set()
        self._ending: list[tuple[Sequence, list[DrawnToken]]] = []
        """Sequences that have ended, whose experts the device copies while it runs another step, and their last tokens."""
        self._lock = threading.Lock()
        self._is_closing = False
        self._error: BaseException | None = None
        self._listeners: set[Listener] = set()
        self._reading_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="moe_jax engine", daemon=True)
        self._thread.start()
        if len(queues) > 1:
            threading.Thread(target=self._watch, name="moe_jax watch", daemon=True).start()

    @property
    def capacity(self) -> int:
        """The number of sequences that may run or wait at one time, on all devices."""
        limits = self.queues[0].limits
        return limits.max_waiting + limits.max_sequences * len(self.queues)

    def add(self, requests: list[list[Sequence]], *, limited: bool, placed: bool = False) -> None:
        """Lets the new sequences of each request wait.

        Args:
          limited: True refuses sequences beyond the limits.
          placed: True leaves each sequence on its `device`, else on the one with the fewest sequences.

        Raises:
          QueueFull: too many sequences run or wait.
          RuntimeError: the engine failed, sleeps or was closed, or the model's arrays were deleted.
        """
        sequences = [sequence for request in requests for sequence in request]
        with self._lock:
            # Under the lock: a request added after the failure would wait forever.
            if (refusal := self.refusal) is not None:
                raise refusal
            room = self.capacity - len(self._open)
            if limited and len(sequences) > room:
                raise QueueFull(f"{len(self._open)} sequences run or wait; the engine has room for {room} more")
            # Also under the lock: once `close` holds it, the thread may end and ignore later commands.
            self._commands.put(lambda: self._let_wait(requests, placed=placed))
            # Last: an interrupted call must not leave sequences open that no queue holds.
            self._open.update(sequences)

    def abort(self, sequences: list[Sequence]) -> None:
        """Ends the given sequences that were added and have not ended yet."""
        self._commands.put(lambda: self._end_all([each for each in sequences if each in self._open]))

    def call[T](self, function: Callable[[], T]) -> T:
        """Runs a function in the thread, between two steps, and returns its result.

        Raises:
          RuntimeError: the engine failed or was closed; and any error that the function raises.
        """
        return self.begin(function).result()

    def begin[T](self, function: Callable[[], T]) -> Future[T]:
        """Does the same as `call`, without waiting for the result."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(function())
            except Exception as error:  # raised again in the waiting caller
                done.set_exception(error)

        with self._lock:
            if (ended := self._ended()) is not None:
                raise ended
            self._commands.put(run)
        return done

    def on_each(self, change: Callable[["EngineLoop"], Any]) -> None:
        """Runs a function of this loop, between two steps."""
        self.call(lambda: change(self))

    def pause(self, is_paused: bool) -> None:
        """Starts no further step until the pause ends."""
        self.on_each(lambda loop: setattr(loop, "is_paused", is_paused))

    def update(self, model: Decoder) -> None:
        """Computes with another model's weights from the next step on. Ends a `sleep`.

        Raises:
          ValueError: the model has another form than the engine's (`Device.weights_of`).
        """
        self.call(lambda: self.replace_weights(self.device.weights_of(model)))

    def replace_weights(self, weights: Weights) -> None:
        """Starts a new version of the weights; only the thread may call this, or another one while `call` holds it."""
        self.device.replace_weights(weights)
        for queues in self.queues:
            change_weights(queues)
        self.is_asleep = False

    def drop_prefixes(self) -> None:
        """Forgets cached prompts; only callers of `replace_weights` may call this."""
        for queues in self.queues:
            drop_prefixes(queues)

    def end(self, error: BaseException) -> None:
        """Ends the thread with an error, as if a step had raised it."""

        def fail() -> None:
            raise error

        self._commands.put(fail)

    def sleep(self) -> None:
        """Lets the device free its arrays. While the loop sleeps, no sequences are accepted.

        Raises:
          RuntimeError: sequences run or wait, or the engine failed or was closed.
        """

        def fall_asleep() -> None:
            with self._lock:
                refuse_to_sleep(len(self._open))
                self.is_asleep = True
            self.device.sleep()

        self.call(fall_asleep)

    def close(self, *, drain: bool) -> None:
        """Ends the thread: after all sequences if `drain`, else aborts them. The device has then freed its memory."""
        with self._lock:
            self.begin_to_close(drain=drain)
        while self._thread.is_alive() and not self._is_stuck:
            self._thread.join(1)

    def begin_to_close(self, *, drain: bool) -> None:
        """Tells the thread to end, without the lock: the garbage collector calls this, and may interrupt the lock's holder."""

        def end() -> None:
            self.is_paused = False
            if not drain:
                self._end_all(self._queued)

        self._is_closing = True
        self._commands.put(end)

    @property
    def failed(self) -> bool:
        """True once an error has ended the thread."""
        return self._error is not None

    @property
    def refusal(self) -> RuntimeError | None:
        """The error with which `add` refuses all sequences now."""
        if (ended := self._ended()) is not None:
            return ended
        if self.is_asleep:
            return RuntimeError("the engine sleeps: call engine.update(model) first")
        return WeightsDeleted() if self.device.weights_are_deleted else None

    @property
    def num_open(self) -> int:
        """The number of sequences that were added, and whose completions were not delivered yet."""
        return len(self._open)

    @property
    def opened(self) -> list[Sequence]:
        """The sequences that were added and have not ended."""
        with self._lock:
            return [sequence for sequence in self._open if sequence.finish_reason is None]

    def stats(self) -> Stats:
        """Returns the present state; any thread may call it."""
        free, cached, owned, _ = map(sum, zip(*(queues.pool.counts() for queues in self.queues), strict=True))
        return Stats(
            running=sum(len(queues.running) for queues in self.queues),
            waiting=sum(len(queues.waiting) for queues in self.queues),
            free_pages=free,
            cached_pages=cached,
            owned_pages=owned,
            num_steps=self._num_steps,
            num_tokens=self._num_tokens,
            num_preemptions=sum(queues.num_preemptions for queues in self.queues),
            weights_version=self.queues[0].weights_version,
            num_drafted=self._num_drafted,
            num_accepted=self._num_accepted,
        )

    def _ended(self) -> RuntimeError | None:
        if self._error is not None:
            ended = RuntimeError(why(self._error))
            ended.__cause__ = self._error
            return ended
        return RuntimeError("the engine is closed") if self._is_closing else None

    def _run(self) -> None:
        try:
            in_flight: Launched | None = None
            while not self._is_closing or in_flight is not None or self._has_sequences or not self._commands.empty():
                self._refill()
                is_idle = in_flight is None and (self.is_paused or not self._has_sequences)
                self._run_commands(wait=is_idle)
                launched = None if self.is_paused else self._launch_next()
                if in_flight is not None:
                    self._read(in_flight)
                if self._is_stuck:
                    return
                if launched is None and self._ending:
                    self._tell_ended()
                # Masks need the tokens of the step before, which are known now.
                in_flight = None if launched is None else launched()
                if self._listeners:
                    wake(self._listeners)
                    self._listeners.clear()
        except BaseException as error:  # after any error, no caller may wait forever
            self._end_by(error)
        finally:
            self.device.release()

    def _watch(self) -> None:
        """Ends all requests if the devices of a group do not end a step. The thread that waits for them may stay forever."""
        while self._thread.is_alive() and not self._is_stuck:
            self._thread.join(LONGEST_STEP / 10)
            began = self._reading_since
            self._is_stuck = began is not None and time.monotonic() - began > LONGEST_STEP
        if self._is_stuck:
            self._end_by(TimeoutError(f"a step did not end within {LONGEST_STEP:.0f} seconds"))

    def _end_by(self, error: BaseException) -> None:
        failure = error if self.name is None else ReplicaFailed(self.name, error)
        _logger.error("%s", why(failure), exc_info=error)
        self._fail(failure)
        self._refill()

    @property
    def _has_sequences(self) -> bool:
        return any(queues.running or queues.waiting for queues in self.queues)

    @property
    def _queued(self) -> list[Sequence]:
        return [each for queues in self.queues for each in (*queues.running, *queues.waiting)]

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = error
            listeners = {sequence.handle.fail(error) for sequence in self._open}
        # Waiting callers get a result. Not under the lock: an abort acquires it. The queues may be corrupt by now.
        while not self._commands.empty():
            with contextlib.suppress(Exception):
                self._commands.get()()
        wake(self._listeners | listeners)

    def _run_commands(self, *, wait: bool) -> None:
        if wait:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()

    def _launch_next(self) -> Callable[[], Launched] | None:
        """Starts the next step as `Device.launch` does. If the weights were deleted, all requests end for that reason."""
        if not self.device.weights_are_deleted:
            try:
                return self._launch_planned()
            except Exception:
                # Weights may be deleted at any moment. A step that fails for this reason has left the state unchanged.
                if not self.device.weights_are_deleted or self.device.state_is_deleted:
                    raise
        for sequence in self._queued:
            sequence.handle.fail(WeightsDeleted())
        self._end_all(self._queued)
        return None

    def _launch_planned(self) -> Callable[[], Launched] | None:
        plans = [plan_step(queues) for queues in self.queues]
        if all(plan.is_empty for plan in plans):
            return None
        self._num_steps += 1
        for plan in plans:
            for sequence, pages in plan.preempted:
                # The sequence may end before it is computed again, and the next step overwrites the pages.
                self._keep_experts(sequence, pages)
        return self.device.launch(plans)

    def _read(self, launched: Launched) -> None:
        """Waits for the tokens of a step, and delivers them to their requests."""
        self._reading_since = time.monotonic()
        samples, drawn, prompts = launched.samples, launched.read(), launched.prompt_scores()
        drafted, self._reading_since = launched.num_drafted(), None
        if self._is_stuck:
            return
        self._tell_ended()
        for sequence, scores in prompts:
            if sequence.finish_reason is None:
                sequence.handle.prompt_logprobs += scores
        self._count_drafts(launched, drafted, drawn)
        tokens = iter([[token for token, _, _ in each] for each in drawn])
        pages = {sequence: list(sequence.pages) for sequence in samples if sequence.options.return_experts}
        taken: list[int] = []
        for queues, plan in zip(self.queues, launched.plans, strict=True):
            taken += read_step(queues, plan, list(islice(tokens, len(plan.samples))), drafted)
        self._num_tokens += sum(taken)
        for sequence, new, count in zip(samples, drawn, taken, strict=True):
            if not count:
                continue
            new = new[:count]
            if sequence.options.logprobs is not None:
                sequence.drawn += new
            if sequence.finish_reason is not None and sequence in pages:
                self._keep_experts(sequence, pages[sequence])
                self._ending.append((sequence, new))
            else:
                self._tell(sequence, new)

    def _tell(self, sequence: Sequence, new: list[DrawnToken]) -> None:
        """Delivers a sequence's new tokens, and its completion if it has ended."""
        if sequence.finish_reason is not None:
            self._complete(sequence)
        if (listener := sequence.handle.deliver(sequence.index, new, sequence.finish_reason)) is not None:
            self._listeners.add(listener)
        if sequence.finish_reason is not None:
            # The handle refers to its sequences: a cycle would keep both, and all tokens, until a full garbage collection.
            sequence.handle = None

    def _tell_ended(self) -> None:
        """Completes the sequences whose experts are being copied to the host."""
        ending, self._ending = self._ending, []
        for sequence, new in ending:
            self._tell(sequence, new)

    def _count_drafts(self, launched: Launched, drafted: list[int], drawn: list[list[DrawnToken]]) -> None:
        for decode, count, tokens in zip(launched.plans[0].decodes, drafted, drawn, strict=False):
            if decode.sequence.finish_reason is None:
                self._num_drafted += count
                self._num_accepted += len(tokens) - 1

    def _end_all(self, sequences: list[Sequence]) -> None:
        """Ends sequences without another token, if they have not ended."""
        for sequence in sequences:
            if sequence.finish_reason is None:
                self._keep_experts(sequence, sequence.pages if sequence.decoding else [])
                finish(self.queues[sequence.device], sequence, "abort")
                self._tell(sequence, [])

    def _keep_experts(self, sequence: Sequence, pages: list[int]) -> None:
        """Copies the experts of a sequence out of its pages, if it has any and its request asks for them."""
        if sequence.options.return_experts and pages:
            sequence.experts = self.device.experts_of(sequence.device, pages)

    def _complete(self, sequence: Sequence) -> None:
        sequence.handle.completions[sequence.index] = completion_of(sequence)
        # The request's handle may live for long, and refers to its sequences.
        sequence.experts = None
        with self._lock:
            self._open.discard(sequence)

    def _let_wait(self, requests: list[list[Sequence]], *, placed: bool) -> None:
        """Queues a request's sequences together on a device, where they share the prompt's pages."""
        for sequences in requests:
            sizes = [len(queues.running) + len(queues.waiting) for queues in self.queues]
            device = sequences[0].device if placed else sizes.index(min(sizes))
            for sequence in sequences:
                sequence.device = device
            self.queues[device].waiting.extend(sequences)


def refuse_to_sleep(num_open: int) -> None:
    """Raises RuntimeError if sequences run or wait."""
    if num_open:
        raise RuntimeError(f"an engine sleeps only without requests; {num_open} sequences run or wait")


def completion_of(sequence: Sequence) -> Completion:
    """Returns the completion of a sequence that has ended."""
    assert sequence.finish_reason is not None
    options, drawn = sequence.options, sequence.drawn
    return Completion(
        tokens=sequence.new_tokens,
        finish_reason=sequence.finish_reason,
        logprobs=None if options.logprobs is None else [logprob for _, logprob, _ in drawn],
        top_logprobs=[tops or {} for *_, tops in drawn] if options.logprobs else None,
        prompt_logprobs=None if options.prompt_logprobs is None else sequence.handle.prompt_logprobs,
        experts=None if sequence.experts is None else np.concatenate(np.asarray(sequence.experts))[: len(sequence.tokens) - 1],
        weights_version=sequence.weights_version,
        cached_tokens=sequence.cached_tokens,
        seed=sequence.seed,
    )
