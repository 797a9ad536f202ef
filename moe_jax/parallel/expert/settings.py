"""How experts are spread over a mesh axis and how tokens travel to them: what a user chooses, and what it costs in memory."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

Transport = Literal["gather", "all_to_all", "ragged", "pairwise"]

TRANSPORTS = get_args(Transport)
"""docs/parallel_experts.md says what each moves and when it pays."""

SMALLEST_CAPACITY = 64
"""Tokens from one device for another that always fit: few tokens are never spread evenly, and their buffers are small."""


ROOM_OF_STEP = 2**18
"""With "pairwise", other devices' tokens are computed together while there is room for no more rows than these, at least those
of one device: fewer matmuls fill the GPU better, while their memory and what travels behind the last stay bounded."""


FLOPS_PER_BYTE = 2210.5263157894738
"""`cost.machine.H200`: FLOP/s of the experts' nine matmuls over the bytes/s of an all-to-all over NVLink."""


@dataclass(frozen=True)
class ExpertParallel:
    """The experts are split over the mesh axis `axis_name`: device i of n holds experts i*E/n to (i+1)*E/n.

    Attributes:
      axis_name: the mesh axis; the layer is called inside a `jax.shard_map` over it.
      transport: one of TRANSPORTS. None takes "gather" where the buffers of an exchange would be as large as what a gather
        brings (2 to 4 devices with 8 choices a token), else "all_to_all"; "pairwise" pays where hops are copies
        (`parallel.hops`), and `Parallelism` takes it there.
      capacity_factor: buffers hold so many times what an even routing brings. What does not fit travels in further rounds; into
        n times as much, on n devices, everything fits.
      drop: None drops nothing. "position" computes what fits in one round, the earlier tokens first, and drops the rest;
        "probability" prefers the tokens that weigh most (GShard, https://arxiv.org/abs/2006.16668, section 2.2).
      group_size: with "pairwise", how many other devices' tokens are computed together. None: as many as ROOM_OF_STEP says.
      shadow_experts: how many experts at most a call may copy to all devices, where that makes the busiest device's work
        shorter by more than the copies take (`parallel.expert.shadow`).
      flops_per_byte: FLOPs of an expert's matmuls that a device does while a byte leaves it: what a shadow's copies cost. With
        0 every shadow pays that takes rows from the busiest device. Default: that of an H200.

    Raises:
      ValueError: an unknown transport or drop, a capacity_factor that is no number above 0, a group_size below 1 or without
        "pairwise", a negative shadow_experts or flops_per_byte.
    """

    axis_name: str = "expert"
    transport: Transport | None = None
    capacity_factor: float = 1.25
    drop: Literal["position", "probability"] | None = None
    group_size: int | None = None
    shadow_experts: int = 0
    flops_per_byte: float = FLOPS_PER_BYTE

    def __post_init__(self):
        if self.transport not in (None, *TRANSPORTS):
            raise ValueError(f"transport must be one of {', '.join(map(repr, TRANSPORTS))} or None; got {self.transport!r}")
        if self.drop not in (None, "position", "probability"):
            raise ValueError(f"drop must be 'position', 'probability' or None; got {self.drop!r}")
        if not 0 < self.capacity_factor < math.inf:
            raise ValueError(f"capacity_factor must be a number above 0; got {self.capacity_factor}")
        if self.group_size is not None and (self.group_size < 1 or self.transport != "pairwise"):
            raise ValueError(f"group_size must be at least 1, and is for transport 'pairwise' alone; got {self.group_size}")
        if self.shadow_experts < 0:
            raise ValueError(f"shadow_experts must be at least 0; got {self.shadow_experts}")
        if not 0 <= self.flops_per_byte < math.inf:
            raise ValueError(f"flops_per_byte must be a number of at least 0; got {self.flops_per_byte}")


class Capacity(NamedTuple):
    """What one device may send to one other in a round: so many tokens, with so many choices of that device's experts."""

    tokens: int
    pairs: int


def first_capacity(tokens: int, k: int, num_experts: int, devices: int, factor: float) -> Capacity:
    """`factor` times what an even routing sends, at least SMALLEST_CAPACITY tokens, at most all `tokens`.

    A token of k different choices among E experts, E/n of them on one device, goes to that device with probability
    1 - C(E - E/n, k) / C(E, k), and makes k/n of its choices there.
    """
    absent = math.comb(num_experts - num_experts // devices, k) / math.comb(num_experts, k) if k <= num_experts else 0.0
    slots = max(SMALLEST_CAPACITY, math.ceil(factor * tokens * (1 - absent)))
    pairs = max(SMALLEST_CAPACITY * k, math.ceil(factor * tokens * k / devices))
    return Capacity(min(slots, tokens), min(pairs, tokens * k))


def further_capacity(first: Capacity, k: int) -> Capacity:
    """So many tokens that their choices fit into the first round's rows wherever they fall."""
    return Capacity(max(1, first.pairs // k), first.pairs)


def devices_of_step(first: Capacity) -> int:
    """How many other devices' tokens "pairwise" computes together, by its own choice."""
    return max(1, ROOM_OF_STEP // first.pairs)
