"""The options `--lora.*` that several commands share: any of them gives adapters."""

from typing import Annotated, Any

import tyro

from moe_jax.adapters.settings import LoraSettings


def lora_of_options(
    rank: int | None = None,
    alpha: float | None = None,
    targets: tuple[str, ...] | None = None,
    ranks: dict[str, int] | None = None,
    shared_outer: bool = False,
    use_rslora: bool = False,
) -> LoraSettings | None:
    """Adapters to train beside frozen weights (docs/adapters.md), if any of these options is given.

    Args:
      rank: the rank of adapters. An expert's is this over the number of a token's experts. Default, if another of these options
        is given: 32.
      alpha: the change is multiplied by alpha / rank. Default: 32.
      targets: any of attention, mlp, experts, router, or projections of attention such as q_proj. Default: attention, mlp and
        experts.
      ranks: ranks of single targets, as in `experts 16 q_proj 64`.
      shared_outer: experts of a layer share the factors on the side of the hidden states.
      use_rslora: multiply the change by alpha / sqrt(rank) instead.
    """
    given: dict[str, Any] = {"rank": rank, "alpha": alpha, "targets": targets, "ranks": ranks}
    given = {name: value for name, value in given.items() if value is not None}
    given |= {name: True for name, value in (("shared_outer", shared_outer), ("use_rslora", use_rslora)) if value}
    return LoraSettings(**given) if given else None


LoraOption = Annotated[LoraSettings | None, tyro.conf.arg(constructor=lora_of_options)]
"""The type of a command's field `lora`."""
