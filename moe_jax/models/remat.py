"""The option `remat`: the layers that are recomputed in the backward pass, and the parts of their residuals that they keep."""

from collections.abc import Iterator
from numbers import Integral
from typing import Any, Literal, get_args

KeptPart = Literal["router", "attention", "experts"]
"""A part of a layer's residuals that a recomputed layer can keep. `jax.ad_checkpoint.checkpoint_name` marks its arrays.

    router       the chosen experts; they are not chosen again
    attention    the output and its log-sum-exp; the forward kernel does not run again
    experts      h and the plan of its rows; tokens are not sorted again, and the gate-up matmul does not run again

They are ordered by the time saved per byte (`cost.layer.seconds_of_parts`), the most first.
"""

KEPT_PARTS: tuple[KeptPart, ...] = get_args(KeptPart)


def layers_and_parts(remat: Any) -> tuple[int, tuple[KeptPart, ...]] | None:
    """Returns the number of last layers that keep their residuals, and the parts that all other layers keep.

    22 and "22" have no parts; "22,router,attention" has two, and "router" keeps no whole layer. None for any other value.
    """
    if isinstance(remat, bool) or not isinstance(remat, str | Integral):
        return None
    words = str(remat).split(",")
    number = words.pop(0) if words[0].isascii() and words[0].isdecimal() else "0"
    if not set(words) <= set(KEPT_PARTS) or len(set(words)) < len(words):
        return None
    return int(number), tuple(part for part in KEPT_PARTS if part in words)


def remat_option(num_kept: int, keep: tuple[KeptPart, ...]) -> int | str:
    """Returns the value of `remat` for a number of layers and the parts of the others: 22 or "22,router"."""
    return ",".join((str(num_kept), *keep)) if keep else num_kept


def choices_of_parts() -> Iterator[tuple[KeptPart, ...]]:
    """Yields the sets of parts worth trying: none, then one more part each time, the cheapest first."""
    return (KEPT_PARTS[:number] for number in range(len(KEPT_PARTS) + 1))
