"""Plans an exchange when it is traced: the transport, the sizes of the buffers, and the steps of "pairwise"."""

from typing import NamedTuple

from moe_jax.kernels.experts.fp8.precision import Precision
from moe_jax.parallel.expert.settings import (
    Capacity,
    ExpertParallel,
    Transport,
    TransportName,
    devices_of_step,
    first_capacity,
    further_capacity,
)


class ExchangePlan(NamedTuple):
    """The facts of a call that are known when it is traced."""

    axis_name: str
    devices: int
    num_experts: int
    """The number of experts of all devices."""
    transport: TransportName | Transport
    """The transport of the first round; further rounds take "all_to_all"."""
    group_size: int | None
    first: Capacity
    further: Capacity
    tokens_in_fp8: bool
    backend: str | None
    precision: Precision | None


def plan_exchange(
    tokens: int,
    k: int,
    devices: int,
    local_experts: int,
    parallel: ExpertParallel,
    backend: str | None = None,
    precision: Precision | None = None,
) -> ExchangePlan:
    """Plans a call in which each device has these numbers of tokens, of choices a token, and of experts."""
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
    at_once = plan.group_size or devices_of_step(plan.first)
    return 1, *(min(at_once, plan.devices - first) for first in range(1, plan.devices, at_once))
