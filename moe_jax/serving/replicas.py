"""Replicas of an engine: each has all weights, a thread, and sequences of its own, on one device or on a group of them.

The devices of a group split the experts, run their steps together, and fail together.

Requests wait in one queue. A request is bound to a device once that device has a slot and pages for it. Before that, it is
unknown which device will be free first. Devices wait for each other only to change weights, between two steps.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from moe_jax.kernels.attention.paged import PAGE_SIZE
from moe_jax.models.decoder import Decoder
from moe_jax.serving.device import Device
from moe_jax.serving.handle import wake
from moe_jax.serving.loop import EngineLoop, QueueFull, Stats, refuse_to_sleep
from moe_jax.serving.pages import pages_of
from moe_jax.serving.request import EngineLimits
from moe_jax.serving.schedule import EngineQueues, Sequence

RUNNING_TOKENS = 40
"""Tokens of a prompt that delay a request as much as one more running sequence: about 0.5 ms on an H200, an estimate."""

CROWDED, MOST_UNEVEN = 64, 1.5
"""A device with more than 64 sequences, and 1.5 times the fewest of any, gets no more, even if it has a prompt's pages."""


class Replicas:
    """Has the methods of `EngineLoop`, and a loop for each of several devices, or for each group of devices.

    A device that fails ends the requests of its group, with an error that names it. The others continue.

    Args:
      devices: each with its queues, one for each device of a group.
      limits: sizes of each device.
    """

    def __init__(self, devices: list[tuple[Device, list[EngineQueues]]], limits: EngineLimits):
        self._limits = limits
        self._waiting: deque[list[Sequence]] = deque()
        """Sequences of requests that are not bound to a device, oldest first."""
        self._changed = threading.Condition()
        """Guards `_waiting`. A loop's lock may be acquired under it, never the reverse."""
        self._holding = threading.Lock()
        self._is_closing = False
        self.loops: list[EngineLoop] = []
        for device, queues in devices:
            self.loops.append(EngineLoop(device, queues, name=device.placement.name, refill=self._bind_waiting))

    @property
    def capacity(self) -> int:
        """The number of sequences that may run or wait at one time, on all devices."""
        return self._limits.max_waiting + sum(map(self._num_slots, self.loops))

    def add(self, requests: list[list[Sequence]], *, limited: bool) -> None:
        """Lets the new sequences of each request wait; arguments and errors as in `EngineLoop.add`."""
        with self._changed:
            if self._is_closing:
                raise RuntimeError("the engine is closed")
            if refusal := next(filter(None, (loop.refusal for loop in self._alive or self.loops)), None):
                raise refusal
            num_open = sum(map(len, self._waiting)) + sum(loop.num_open for loop in self._alive)
            if limited and sum(map(len, requests)) > (room := self.capacity - num_open):
                raise QueueFull(f"{num_open} sequences run or wait; the engine has room for {room} more")
            self._waiting.extend(requests)
            self._bind_waiting()

    @property
    def opened(self) -> list[Sequence]:
        """The sequences that were added and have not ended."""
        with self._changed:
            waiting = [sequence for request in self._waiting for sequence in request]
            return [*waiting, *(sequence for loop in self._alive for sequence in loop.opened)]

    def abort(self, sequences: list[Sequence]) -> None:
        """Ends the given sequences that were added and have not ended yet."""
        aborted = set(sequences)
        with self._changed:
            unbound = [each for request in self._waiting for each in request if each in aborted]
            if unbound:
                rest = ([each for each in request if each not in aborted] for request in self._waiting)
                self._waiting = deque(filter(None, rest))
                # Only a loop can end a sequence. Any loop can, even a full one.
                if not any(_added(loop, [unbound]) for loop in self.loops):
                    self._waiting.appendleft(unbound)
                    self._bind_waiting()
                self._changed.notify_all()
        for loop in self.loops:
            loop.abort(sequences)

    def on_each(self, change: Callable[[EngineLoop], Any]) -> None:
        """Runs a function of each loop, between two steps of all."""
        with self._held() as loops:
            for loop in loops:
                change(loop)

    def pause(self, is_paused: bool) -> None:
        """Starts no further step until the pause ends."""
        self.on_each(lambda loop: setattr(loop, "is_paused", is_paused))

    def update(self, model: Decoder) -> None:
        """Computes with another model's weights; no device starts a step before all have them.

        Raises:
          ValueError: the model has another form than the engine's (`Device.weights_of`). Nothing has changed then.
          RuntimeError: a device that could not copy the weights has failed. The others have them.
        """
        failures: list[RuntimeError] = []
        with self._held() as loops:
            weights = loops[0].device.weights_of(model)
            for loop in loops:
                try:
                    loop.replace_weights(weights)
                except Exception as error:
                    loop.end(error)
                    failures.append(RuntimeError(f"{loop.name} got no new weights: {type(error).__name__}: {error}"))
        if failures:
            raise failures[0]

    def sleep(self) -> None:
        """Lets the devices free their arrays; errors as in `EngineLoop.sleep`."""
        with self._held() as loops, self._changed:
            refuse_to_sleep(sum(map(len, self._waiting)) + sum(loop.num_open for loop in loops))
            for loop in loops:
                loop.is_asleep = True
                loop.device.sleep()

    def close(self, *, drain: bool) -> None:
        """Ends the threads: after all sequences if `drain`, else aborts them."""
        if drain:
            # None is left to hold if all have failed.
            with contextlib.suppress(RuntimeError), self._held() as loops:
                self._is_closing = True
                for loop in loops:
                    loop.is_paused = False
        with self._changed:
            self._is_closing = True
            if drain:
                self._changed.wait_for(lambda: not self._waiting)
            else:
                self.abort([each for request in self._waiting for each in request])
        for loop in self.loops:
            loop.close(drain=drain)

    def begin_to_close(self, *, drain: bool) -> None:
        """Tells the threads to end, without a lock, as `EngineLoop.begin_to_close` does.

        No request waits when the garbage collector calls this: its handle would keep the engine alive.
        """
        self._is_closing = True
        for loop in self.loops:
            loop.begin_to_close(drain=drain)

    @property
    def failed(self) -> bool:
        """True once all devices have failed."""
        return not self._alive

    def stats(self) -> Stats:
        """Returns the sums of the devices' numbers."""
        sums = Stats(*map(sum, zip(*self.stats_of_devices().values(), strict=True)))
        waiting = sums.waiting + sum(map(len, list(self._waiting)))
        return sums._replace(waiting=waiting, weights_version=max(loop.queues[0].weights_version for loop in self.loops))

    def stats_of_devices(self) -> dict[str, Stats]:
        """Returns the present state of each device. A failed one has no sequences and no pages."""
        nothing = dict.fromkeys(("running", "waiting", "free_pages", "cached_pages", "owned_pages"), 0)
        return {str(loop.name): loop.stats()._replace(**nothing if loop.failed else {}) for loop in self.loops}

    @property
    def _alive(self) -> list[EngineLoop]:
        return [loop for loop in self.loops if not loop.failed]

    @contextlib.contextmanager
    def _held(self) -> Iterator[list[EngineLoop]]:
        """Holds all loops between two steps, and yields those that have not failed.

        Raises:
          RuntimeError: all devices have failed, or the engine is closed.
        """
        released = threading.Event()
        # One caller at a time: two could each hold a loop that the other one waits for.
        with self._holding:
            try:
                arrivals = [arrived for loop in self._alive if (arrived := _hold(loop, released)) is not None]
                for arrived in arrivals:
                    arrived.wait()
                if refusal := next((loop.refusal for loop in self.loops if self.failed), None):
                    raise refusal
                if self._is_closing:
                    raise RuntimeError("the engine is closed")
                yield self._alive
            finally:
                released.set()

    def _bind_waiting(self) -> None:
        """Binds requests to devices in order of arrival, while a device has room for the next one.

        Each loop calls this between two steps. So nothing that makes room is missed.
        """
        if not self._waiting:
            return
        with self._changed:
            # A device that refuses sequences now has failed since the last round.
            while self._waiting and not self._bind_round():
                pass
            self._changed.notify_all()

    def _bind_round(self) -> bool:
        """Binds all requests that have room; False if a device refused some: they wait again."""
        usable = [loop for loop in self.loops if loop.refusal is None]
        if not usable:
            error = next(loop.refusal for loop in self._alive or self.loops)
            wake({each.handle.fail(error) for request in self._waiting for each in request})
            self._waiting.clear()
            return True
        with_slots = [loop for loop in usable if loop.num_open < self._num_slots(loop)]
        loads = [ReplicaLoad(loop, number) for loop in with_slots for number in range(len(loop.queues))]
        while self._waiting and (load := cheapest(loads, self._waiting[0])) is not None:
            request, room = self._waiting.popleft(), self._limits.max_sequences - load.num_sequences
            load.bind(request[:room])
            if request[room:]:
                self._waiting.appendleft(request[room:])
        # All at once: else the requests of a step, and so rounding, would depend on the speed of this thread.
        refused = [load.bound for load in loads if load.bound and not _added(load.loop, load.bound)]
        self._waiting.extendleft(request for bound in refused for request in reversed(bound))
        return not refused

    def _num_slots(self, loop: EngineLoop) -> int:
        return self._limits.max_sequences * len(loop.queues)


class ReplicaLoad:
    """The work of a device, with the requests that are being bound to it.

    Args:
      number: of the device in its group.
    """

    def __init__(self, loop: EngineLoop, number: int):
        queues, opened = loop.queues[number], [each for each in loop.opened if each.device == number]
        self.loop, self._number = loop, number
        self.bound: list[list[Sequence]] = []
        self.num_sequences = len(opened)
        self._limits, self._pool, self._root = queues.limits, queues.pool, queues.root
        self._prompt_tokens = sum(len(each.tokens) - each.num_scheduled for each in opened if not each.decoding)
        without_slot = (pages_of(len(each.tokens)) for each in opened if each.slot is None)
        self._free_pages = queues.pool.available - sum(without_slot)

    def has_room(self, request: list[Sequence]) -> bool:
        """Returns True if the device has a slot and pages for a request's first sequence; an idle device always has."""
        if not self.num_sequences:
            return True
        # A page for each running sequence, as in `schedule.plan_step`.
        pages = pages_of(len(request[0].tokens)) - self._num_found(request[0]) + self.num_sequences
        return self.num_sequences < self._limits.max_sequences and pages <= self._free_pages

    def cost(self, request: list[Sequence]) -> int:
        """Returns the tokens to compute before a request's first new one; a running sequence counts as some."""
        new = len(request[0].tokens) - PAGE_SIZE * self._num_found(request[0])
        return new + self._prompt_tokens + RUNNING_TOKENS * self.num_sequences

    def bind(self, request: list[Sequence]) -> None:
        """Adds the sequences of a request, which share the prompt's full pages."""
        length, found = len(request[0].tokens), self._num_found(request[0])
        for sequence in request:
            sequence.device = self._number
        self.bound.append(request)
        self.num_sequences += len(request)
        self._prompt_tokens += length - PAGE_SIZE * found
        self._free_pages -= pages_of(length) - found + len(request) - 1

    def _num_found(self, sequence: Sequence) -> int:
        """Returns the number of pages of the prompt that the device has now; its thread may evict some before they are used."""
        if sequence.scores_prompt:
            return 0
        return len(self._pool.find(sequence.page_hashes(self._root, (len(sequence.tokens) - 1) // PAGE_SIZE)))


def cheapest(loads: list[ReplicaLoad], request: list[Sequence]) -> ReplicaLoad | None:
    """Returns the load of the device that a request is bound to; None if no device has room for it."""
    with_room = [load for load in loads if load.has_room(request)]
    most = max(CROWDED, MOST_UNEVEN * min((load.num_sequences for load in with_room), default=0))
    return min((load for load in with_room if load.num_sequences <= most), key=lambda load: load.cost(request), default=None)


def _added(loop: EngineLoop, requests: list[list[Sequence]]) -> bool:
    """Adds sequences to a loop; False if it has failed since it was chosen."""
    try:
        loop.add(requests, limited=False, placed=True)
    except RuntimeError:
        return False
    return True


def _hold(loop: EngineLoop, released: threading.Event) -> threading.Event | None:
    """Lets a loop wait between two steps until it is released; returns the event of its arrival, or None if it has ended."""
    arrived = threading.Event()

    def wait() -> None:
        arrived.set()
        released.wait()

    try:
        loop.begin(wait)
    except RuntimeError:
        return None
    return arrived
