"""The engine's thread: it plans a step, starts it on the device, and only then reads the tokens of the step before.

So host and device work at the same time. A sequence that ends is found one step late, which costs one row of one step. All
state of the engine is changed by this thread alone: other threads hand it functions to run between two steps.
"""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from moe_jax.serving.delivery import TokenDelivery
from moe_jax.serving.device import Device, Launched
from moe_jax.serving.handle import WeightsDeleted, why
from moe_jax.serving.queues import EngineQueues
from moe_jax.serving.schedule import plan_step
from moe_jax.serving.sequence import Sequence

_logger = logging.getLogger(__name__)


class QueueFull(Exception):
    """The engine has as many requests as `EngineLimits.max_waiting` lets wait."""


class EngineLoop:
    """The thread and what it changes.

    Attributes:
      device: changed by the thread alone, as the queues are; others may read numbers from them.
      queues: one for each of the devices that compute.
      is_paused: True while no step is to start.
      delivery: gives requests their tokens.
      num_steps: steps started so far.
    """

    def __init__(self, device: Device, queues: list[EngineQueues]):
        self.device = device
        self.queues = queues
        self.is_paused = False
        self.num_steps = 0
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._open: set[Sequence] = set()
        self._lock = threading.Lock()
        self._is_closing = False
        self._error: BaseException | None = None
        self.delivery = TokenDelivery(device, queues, ended=self._forget)
        self._thread = threading.Thread(target=self._run, name="moe_jax engine", daemon=True)
        self._thread.start()

    @property
    def capacity(self) -> int:
        """The number of sequences that may run or wait at one time, on all devices."""
        limits = self.queues[0].limits
        return limits.max_waiting + limits.max_sequences * len(self.queues)

    def add(self, sequences: list[Sequence], *, limited: bool) -> None:
        """Lets new sequences wait.

        Args:
          limited: True refuses more than the limits let wait.

        Raises:
          QueueFull: too many sequences run or wait.
          RuntimeError: the engine failed or was closed, or the model's arrays were deleted.
        """
        with self._lock:
            # Under the lock: a request that came behind the failure would wait for ever.
            self._refuse_if_ended()
            if self.device.weights_are_deleted:
                raise WeightsDeleted
            room = self.capacity - len(self._open)
            if limited and len(sequences) > room:
                raise QueueFull(f"{len(self._open)} sequences run or wait; the engine has room for {room} more")
            # Under it too: the thread may end once `close` has the lock, and would leave what comes later.
            self._commands.put(lambda: self._let_wait(sequences))
            # Last: an interrupted call leaves none open that no queue will have.
            self._open.update(sequences)

    def abort(self, sequences: list[Sequence]) -> None:
        """Ends those that were added and have not ended yet."""
        self._commands.put(lambda: self.delivery.end_all([each for each in sequences if each in self._open]))

    def call[T](self, function: Callable[[], T]) -> T:
        """Runs a function in the thread, between two steps, and returns its result.

        Raises:
          RuntimeError: the engine failed or was closed; and whatever the function raises.
        """
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(function())
            except Exception as error:  # raised again where the caller waits
                done.set_exception(error)

        with self._lock:
            self._refuse_if_ended()
            self._commands.put(run)
        return done.result()

    def close(self, *, drain: bool) -> None:
        """Ends the thread: after all sequences with `drain`, else aborts them. Then the device has freed its memory."""
        with self._lock:
            self.begin_to_close(drain=drain)
        self._thread.join()

    def begin_to_close(self, *, drain: bool) -> None:
        """Tells the thread to end, without the lock: the garbage collector calls this, and may interrupt who holds it."""

        def end() -> None:
            self.is_paused = False
            if not drain:
                self.delivery.end_all(self._queued)

        self._is_closing = True
        self._commands.put(end)

    @property
    def failed(self) -> bool:
        """True once an error has ended the thread."""
        return self._error is not None

    def _refuse_if_ended(self) -> None:
        if self._error is not None:
            raise RuntimeError(why(self._error)) from self._error
        if self._is_closing:
            raise RuntimeError("the engine is closed")

    def _run(self) -> None:
        try:
            in_flight: Launched | None = None
            while not self._is_closing or in_flight is not None or self._has_sequences or not self._commands.empty():
                is_idle = in_flight is None and (self.is_paused or not self._has_sequences)
                self._run_commands(wait=is_idle)
                launched = None if self.is_paused else self._launch_next()
                if in_flight is not None:
                    self.delivery.read(in_flight)
                in_flight = launched
                self.delivery.wake_readers()
        except BaseException as error:  # whatever it was, nobody may wait for ever
            _logger.exception("the engine failed")
            self._fail(error)
        finally:
            self.device.release()

    @property
    def _has_sequences(self) -> bool:
        return any(queues.running or queues.waiting for queues in self.queues)

    @property
    def _queued(self) -> list[Sequence]:
        return [each for queues in self.queues for each in (*queues.running, *queues.waiting)]

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = error
            listeners = {sequence.owner.handle.fail(error) for sequence in self._open}
        # Callers that wait for a result get one. Not under the lock: an abort takes it. The queues may be of no use any more.
        while not self._commands.empty():
            with contextlib.suppress(Exception):
                self._commands.get()()
        self.delivery.wake_readers({listener for listener in listeners if listener is not None})

    def _run_commands(self, *, wait: bool) -> None:
        if wait:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()

    def _launch_next(self) -> Launched | None:
        """Starts the next step. Without weights nothing can run: all requests end with the reason, until `update`."""
        if not self.device.weights_are_deleted:
            try:
                return self._launch_planned()
            except Exception:
                # They may be deleted at any moment. A step that was refused for it has left the state as it was.
                if not self.device.weights_are_deleted or self.device.state_is_deleted:
                    raise
        for sequence in self._queued:
            sequence.owner.handle.fail(WeightsDeleted())
        self.delivery.end_all(self._queued)
        return None

    def _launch_planned(self) -> Launched | None:
        plans = [plan_step(queues) for queues in self.queues]
        if all(plan.is_empty for plan in plans):
            return None
        self.num_steps += 1
        for queues, plan in zip(self.queues, plans, strict=True):
            for chunk in plan.chunks:
                chunk.sequence.owner.started(queues.weights_version)
            for sequence, pages in plan.preempted:
                # It may end before it is computed again, and the next step writes to the pages.
                self.delivery.keep_experts(sequence, pages)
        return self.device.launch(plans)

    def _let_wait(self, sequences: list[Sequence]) -> None:
        """Lets the continuations of a prompt wait for the device that has the fewest sequences: there they share its pages."""
        sizes = [len(queues.running) + len(queues.waiting) for queues in self.queues]
        device = sizes.index(min(sizes))
        for sequence in sequences:
            sequence.device = device
        self.queues[device].waiting.extend(sequences)

    def _forget(self, sequence: Sequence) -> None:
        with self._lock:
            self._open.discard(sequence)


class Stats(NamedTuple):
    """The state of an engine: numbers of all its devices together."""

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
    """Drafts that were accepted so far: each gave a token without a step of its own."""

    @property
    def acceptance_rate(self) -> float:
        """The accepted share of the drafts; 0 without any."""
        return self.num_accepted / max(self.num_drafted, 1)


def stats_of(loop: EngineLoop) -> Stats:
    """Returns the present state; any thread may call it."""
    delivery, pages = loop.delivery, [queues.pool.counts() for queues in loop.queues]
    return Stats(
        running=sum(len(queues.running) for queues in loop.queues),
        waiting=sum(len(queues.waiting) for queues in loop.queues),
        free_pages=sum(each.free for each in pages),
        cached_pages=sum(each.cached for each in pages),
        owned_pages=sum(each.owned for each in pages),
        num_steps=loop.num_steps,
        num_tokens=delivery.num_tokens,
        num_preemptions=sum(queues.num_preemptions for queues in loop.queues),
        weights_version=loop.queues[0].weights_version,
        num_drafted=delivery.num_drafted,
        num_accepted=delivery.num_accepted,
    )
