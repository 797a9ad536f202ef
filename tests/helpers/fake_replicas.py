"""Replicas whose devices compute nothing but what pages hold (`fake_device`), and requests to them."""

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

from moe_jax.serving.handle import Handle
from moe_jax.serving.replicas import Replicas
from moe_jax.serving.request import SamplingOptions
from moe_jax.serving.schedule import EngineQueues, Sequence
from tests.helpers.fake_device import FakeDevice


class FakeReplica:
    """A device, or a group, as a loop sees it. `error`: the next step raises it. `hangs`: its steps wait for this event."""

    def __init__(self, limits, number, size=1):
        self.devices = [FakeDevice(limits) for _ in range(size)]
        self.placement = SimpleNamespace(name=", ".join(f"fake:{number * size + i}" for i in range(size)))
        self.error = self.error_of_update = self.hangs = None
        self.weights_are_deleted = self.state_is_deleted = self.asleep = False

    def launch(self, plans):
        if self.error is not None:
            raise self.error
        drawn = [tokens for device, plan in zip(self.devices, plans, strict=True) for tokens in device.run(plan)]
        launched = FakeLaunched(plans, [[(token, 0.0, None) for token in tokens] for tokens in drawn], self.hangs)
        return lambda: launched

    def weights_of(self, version):
        return version

    def replace_weights(self, version):
        if self.error_of_update is not None:
            raise self.error_of_update
        self.asleep = self.weights_are_deleted = False
        for device in self.devices:
            device.version = version

    def sleep(self):
        self.asleep = True

    def release(self):
        pass


@dataclass
class FakeLaunched:
    """A step that has been computed."""

    plans: list
    drawn: list
    hangs: threading.Event | None = None
    samples: list = field(init=False)

    def __post_init__(self):
        self.samples = [sequence for plan in self.plans for sequence in plan.samples]

    def read(self):
        if self.hangs is not None:
            self.hangs.wait()
        return self.drawn

    def num_drafted(self):
        return [0] * len(self.plans[0].decodes)

    def prompt_scores(self):
        return []


def replicas_of(limits, size=1):
    """Returns running replicas of `size` devices each, and these groups."""
    groups = [FakeReplica(limits, number, size) for number in range(limits.replicas)]
    return Replicas([(group, [EngineQueues(limits) for _ in range(size)]) for group in groups], limits), groups


def request_of(replicas, prompt, new=5, n=1):
    """Returns the handle of a request, and its sequences, as an engine makes them."""
    options = SamplingOptions(max_new_tokens=new, n=n)
    handle = Handle(prompt, options, lambda numbers: replicas.abort([sequences[i] for i in numbers]))
    sequences = [Sequence(prompt, options, index=index, handle=handle) for index in range(n)]
    return handle, sequences


def submit(replicas, prompt, new=5, n=1):
    """Adds a request; returns its handle."""
    handle, sequences = request_of(replicas, prompt, new, n)
    replicas.add([sequences], limited=True)
    return handle
