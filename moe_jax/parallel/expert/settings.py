"""Settings of expert parallelism: how experts and tokens travel, sizes of buffers, and the plan of a call."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from moe_jax.kernels.experts.fp8.precision import Precision
from moe_jax.parallel.choices import Hops

if TYPE_CHECKING:
    from moe_jax.kernels.experts.activation import Activation

TransportName = Literal["gather", "all_to_all", "pairwise"]

TRANSPORTS = get_args(TransportName)
"""The names of the built-in transports. docs/parallel_experts.md compares their traffic and when each pays off."""


@dataclass(frozen=True)
class Transport:
    """A custom way to move tokens between devices, accepted by `ExpertParallel.transport` in place of a built-in name.

    Attributes:
      name: a name for tables and messages.
      to_experts: (x [tokens, features], route, axis_name) -> [received, features], as `pairwise.to_experts`.
      to_home: (rows [received, features], route, axis_name) -> [tokens, features], the transpose of `to_experts`.
    """

    name: str
    to_experts: Callable
    to_home: Callable


SMALLEST_CAPACITY = 64
"""Tokens that one device can always send to another. A few tokens never spread evenly, and their buffers are small."""


MAX_ROWS_PER_STEP = 2**18
"""Upper bound on the rows that one "pairwise" step computes for other devices; a step holds at least one device's rows.

Fewer, larger matmuls fill the GPU better. The bound limits memory, and the transfers after the last matmul."""


NEEDS_ONE_CALL = (
    "weight tickets hold the operands of one call of the kernels: use drop, or a capacity_factor of at least the number of "
    "devices, with transport 'all_to_all' or 'gather' (hops='nccl') and shadow_experts=0"
)
"""The reason why the weight gradients of experts in several calls cannot be put off (`ExpertParallel.is_one_call`)."""


FLOPS_PER_BYTE = 2210.5263157894738
"""`cost.machine.H200`: FLOP/s of the experts' nine matmuls over the bytes/s of an all-to-all over NVLink."""


@dataclass(frozen=True)
class ExpertParallel:
    """Splits the experts over the mesh axis `axis_name`: device i of n holds experts i*E/n to (i+1)*E/n.

    Attributes:
      axis_name: the mesh axis. The layer is called inside a `jax.shard_map` over it.
      transport: one of TRANSPORTS, or a `Transport`. None selects "gather" if the buffers of an exchange would be as large as
        the result of a gather, else "all_to_all". With 8 choices per token this holds on 2 to 4 devices. "pairwise" pays off if
        tokens travel as peer-to-peer copies (`Parallelism` with `hops="copies"` then selects it).
      capacity_factor: the size of the buffers relative to an even routing. Tokens that do not fit travel in further rounds. On
        n devices a factor of n fits every routing.
      drop: None drops nothing. "position" and "probability" compute one round and drop the tokens that do not fit.
        "position" keeps the earlier tokens. "probability" keeps the tokens with the largest weights (GShard,
        https://arxiv.org/abs/2006.16668, section 2.2).
      group_size: the number of other devices whose tokens one "pairwise" step computes. None: MAX_ROWS_PER_STEP decides.
      shadow_experts: the largest number of experts that a call may copy to all devices. It copies an expert if that saves
        the busiest device more time than the copies take (`parallel.expert.shadow`).
      flops_per_byte: FLOPs of an expert's matmuls that a device computes while one byte leaves it. This is the price of a
        shadow's copies. With 0 every shadow that relieves the busiest device pays off. Default: an H200's ratio.
      tokens_in_fp8: send tokens to FP8 experts in FP8: half the bytes, and the same outputs. Needs a `Precision`. The gate and
        up weights' gradients then use the rounded tokens. Outputs and gradients travel in their usual dtype.

    Raises:
      ValueError: an unknown transport or drop, or a capacity_factor that is not a number above 0. Also a group_size below 1
        or without "pairwise", and a negative shadow_experts or flops_per_byte.
    """

    axis_name: str = "expert"
    transport: TransportName | Transport | None = None
    capacity_factor: float = 1.25
    drop: Literal["position", "probability"] | None = None
    group_size: int | None = None
    shadow_experts: int = 0
    flops_per_byte: float = FLOPS_PER_BYTE
    tokens_in_fp8: bool = False

    def __post_init__(self):
        if self.transport == "ragged":
            raise ValueError("transport 'ragged' is experimental: pass the object RAGGED of moe_jax.experimental.ragged")
        if not isinstance(self.transport, Transport) and self.transport not in (None, *TRANSPORTS):
            names = ", ".join(map(repr, TRANSPORTS))
            raise ValueError(f"transport must be one of {names}, a Transport or None; got {self.transport!r}")
        if self.drop not in (None, "position", "probability"):
            raise ValueError(f"drop must be 'position', 'probability' or None; got {self.drop!r}")
        if not 0 < self.capacity_factor < math.inf:
            raise ValueError(f"capacity_factor must be a number above 0; got {self.capacity_factor}")
        if self.group_size is not None and (self.group_size < 1 or self.transport != "pairwise"):
            raise ValueError(f"group_size must be at least 1, and only transport 'pairwise' takes it; got {self.group_size}")
        if self.shadow_experts < 0:
            raise ValueError(f"shadow_experts must be at least 0; got {self.shadow_experts}")
        if not 0 <= self.flops_per_byte < math.inf:
            raise ValueError(f"flops_per_byte must be a number of at least 0; got {self.flops_per_byte}")

    def over(self, devices: int, hops: Hops) -> "ExpertParallel":
        """Returns the settings with "pairwise" for an unset transport, if tokens are copied and buffers fit every routing."""
        is_pairwise = self.transport is None and hops == "copies" and self.capacity_factor >= devices
        return replace(self, transport="pairwise") if is_pairwise else self

    def is_one_call(self, devices: int) -> bool:
        """Returns True if, under any routing, one call of the kernels computes everything that a device's experts compute."""
        is_one_round = self.drop is not None or self.capacity_factor >= devices
        return is_one_round and self.transport != "pairwise" and self.shadow_experts == 0


class Capacity(NamedTuple):
    """The size of a send buffer per destination device and round."""

    tokens: int
    """Tokens that fit."""
    pairs: int
    """Choices of the other device's experts that fit, over all tokens in the buffer."""


def first_capacity(tokens: int, k: int, num_experts: int, devices: int, factor: float) -> Capacity:
    """Returns the first round's buffer size: `factor` times the traffic of even routing, SMALLEST_CAPACITY to `tokens`.

    A token chooses k different experts of E, and one device holds E/n of them. The token goes to that device with probability
    1 - C(E - E/n, k) / C(E, k), and makes k/n choices there on average.
    """
    absent = math.comb(num_experts - num_experts // devices, k) / math.comb(num_experts, k) if k <= num_experts else 0.0
    slots = max(SMALLEST_CAPACITY, math.ceil(factor * tokens * (1 - absent)))
    pairs = max(SMALLEST_CAPACITY * k, math.ceil(factor * tokens * k / devices))
    return Capacity(min(slots, tokens), min(pairs, tokens * k))


def further_capacity(first: Capacity, k: int) -> Capacity:
    """Returns the buffer size of overflow rounds. Under any routing its choices fit into the first round's rows."""
    return Capacity(max(1, first.pairs // k), first.pairs)


class ExchangePlan(NamedTuple):
    """The static configuration of one call: devices, transport, buffer sizes, backend and precision."""

    axis_name: str
    devices: int
    num_experts: int
    """The number of experts of all devices."""
    transport: TransportName | Transport
    """The transport of the first round; further rounds use "all_to_all"."""
    group_size: int | None
    first: Capacity
    further: Capacity
    tokens_in_fp8: bool
    backend: str | None
    precision: Precision | None
    activation: "Activation | None" = None
    """None: silu(gate) * up."""

    def received(self, tokens: int) -> int:
        """Returns the token slots that a device has after the first dispatch, filled or not, if each device sends `tokens`."""
        return self.devices * (tokens if self.transport == "gather" else self.first.tokens)


def plan_exchange(
    tokens: int,
    k: int,
    devices: int,
    local_experts: int,
    parallel: ExpertParallel,
    backend: str | None = None,
    precision: Precision | None = None,
) -> ExchangePlan:
    """Builds the `ExchangePlan` for `tokens` per device, `k` choices per token and `local_experts` per device."""
    num_experts = local_experts * devices
    first = first_capacity(tokens, k, num_experts, devices, parallel.capacity_factor)
    transport = parallel.transport or ("gather" if first.tokens == tokens else "all_to_all")
    if transport == "gather" and parallel.drop is None:
        first = first._replace(tokens=tokens)
    return ExchangePlan(
        axis_name=parallel.axis_name,
        devices=devices,
        num_experts=num_experts,
        transport=transport,
        group_size=parallel.group_size,
        first=first,
        further=further_capacity(first, k),
        tokens_in_fp8=parallel.tokens_in_fp8,
        backend=backend,
        precision=precision,
    )


def devices_per_step(plan: ExchangePlan) -> tuple[int, ...]:
    """Returns the number of devices whose tokens each "pairwise" step computes: this device alone, then groups of others."""
    at_once = plan.group_size or max(1, MAX_ROWS_PER_STEP // plan.first.pairs)
    return 1, *(min(at_once, plan.devices - first) for first in range(1, plan.devices, at_once))
