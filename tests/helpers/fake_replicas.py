"""Replicas whose devices compute nothing but what pages hold (`fake_device`), and requests to them."""

from dataclasses import dataclass, field
from types import SimpleNamespace

from moe_jax.serving.handle import Handle
from moe_jax.serving.replicas import Replicas
from moe_jax.serving.request import SamplingOptions
from moe_jax.serving.schedule import EngineQueues, Sequence
from tests.helpers.fake_device import FakeDevice


class FakeReplica:
    """A device as a loop sees it. `error`: the next step raises it. `deleted`: the model's arrays were deleted."""

    def __init__(self, limits, number):
        self.device = FakeDevice(limits)
        self.placement = SimpleNamespace(devices=(f"fake:{number}",))
        self.error = self.error_of_update = None
        self.weights_are_deleted = self.state_is_deleted = self.asleep = False

    def launch(self, plans):
        if self.error is not None:
            raise self.error
        (plan,) = plans
        launched = FakeLaunched(plans, [[(token, 0.0, None) for token in tokens] for tokens in self.device.run(plan)])
        return lambda: launched

    def weights_of(self, version):
        return version

    def replace_weights(self, version):
        if self.error_of_update is not None:
            raise self.error_of_update
        self.device.version, self.asleep, self.weights_are_deleted = version, False, False

    def sleep(self):
        self.asleep = True

    def release(self):
        pass


@dataclass
class FakeLaunched:
    """A step that has been computed."""

    plans: list
    drawn: list
    samples: list = field(init=False)

    def __post_init__(self):
        self.samples = self.plans[0].samples

    def read(self):
        return self.drawn

    def num_drafted(self):
        return [0] * len(self.plans[0].decodes)

    def prompt_scores(self):
        return []


def replicas_of(limits):
    """Returns running replicas, and their devices."""
    devices = [FakeReplica(limits, number) for number in range(limits.replicas)]
    return Replicas([(device, EngineQueues(limits)) for device in devices], limits), devices


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
