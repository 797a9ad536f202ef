"""Compares a merged checkpoint with the base and the adapter that it was made of, tensor by tensor.

This reads what was written, and adds the changes in numpy under the checkpoint's names. A merge that loses a matrix, or gives
an expert another one's change, shows here.
"""

from collections.abc import Iterable
from itertools import zip_longest
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from moe_jax.adapters.names import modules_of
from moe_jax.models.decoder import Decoder

ABSENT = "", np.empty(0)
DO_NOT = "do not use this checkpoint"


class Change(NamedTuple):
    """The change b a of a matrix, on the host in f32."""

    a: np.ndarray
    b: np.ndarray


class Agreement(NamedTuple):
    """The result of a comparison: matrices that the adapter changed, and the largest relative error of one of them."""

    changed: int
    largest_error: float


def changes_of(model: Decoder) -> dict[str, Change]:
    """Returns the changes of all adapted matrices of a model, under the checkpoint's names of their weights."""
    found: dict[str, Change] = {}
    on_host: dict[tuple, Change] = {}
    for module in modules_of(model):
        if (adapter := module.target.found) is None:
            continue
        key = *module.target.path, module.target.adapter
        if key not in on_host:
            on_host[key] = Change(*(np.asarray(factor) for factor in adapter.factors))
        a, b = (factor[module.layer] for factor in on_host[key])
        if module.expert is not None:
            # One factor stands for all experts if they share it.
            a, b = (factor[min(module.expert, len(factor) - 1)] for factor in (a, b))
        found[f"{module.name}.weight"] = Change(a, b[module.rows])
    return found


def check_merged(
    merged: Iterable[tuple[str, np.ndarray]], base: Iterable[tuple[str, np.ndarray]], changes: dict[str, Change]
) -> Agreement:
    """Compares each tensor of `merged` with base + b a, up to one rounding to its dtype.

    Args:
      merged, base: (name, array) in the order of `checkpoint.hf_names.export`.
      changes: as from `changes_of`.

    Raises:
      ArithmeticError: a tensor is another one, or a change is nowhere; the message names the first.
    """
    left, largest = dict(changes), 0.0
    for (name, array), (base_name, weight) in zip_longest(merged, base, fillvalue=ABSENT):
        if name != base_name or array.shape != weight.shape:
            raise ArithmeticError(f"{name or base_name}: the merged checkpoint and the base do not have the same tensors")
        change = left.pop(name, None)
        if change is None:
            if not np.array_equal(array, weight.astype(array.dtype)):
                raise ArithmeticError(f"{name}: the adapter does not change it, and yet it differs from the base's; {DO_NOT}")
            continue
        largest = max(largest, _error(name, array, weight, change))
    if left:
        raise ArithmeticError(f"{next(iter(left))}: the adapter changes it, and the merged checkpoint lacks it; {DO_NOT}")
    return Agreement(len(changes), largest)


def _error(name: str, array: np.ndarray, weight: np.ndarray, change: Change) -> float:
    """Returns the relative error of a changed matrix, in the Frobenius norm, after a check of each number."""
    product = change.b @ change.a
    expected = weight.astype(np.float32) + product
    # Half of the last place from rounding to the dtype; sums in another order give the rest.
    room = np.abs(expected) * float(jnp.finfo(array.dtype).eps) + 1e-5 * np.abs(product).max(initial=0)
    difference = np.abs(array.astype(np.float32) - expected)
    if not (difference <= room).all():
        raise ArithmeticError(
            f"{name}: the merged checkpoint differs from base + adapter by up to {difference.max():.1e}, which no rounding to "
            f"{array.dtype} explains; {DO_NOT}"
        )
    return float(np.linalg.norm(difference) / max(np.linalg.norm(expected), float(np.finfo(np.float32).tiny)))
