"""The experts of a fused layer, split over the devices of a group: each device holds some, and computes them for all tokens.

| step | on each device |
|---|---|
| gather | gets the normed rows of all devices' tokens |
| choose | chooses the experts of all these tokens, so that no choice travels |
| compute | runs the kernels of one device, with the experts that it holds |
| return | sends a row of each choice to the token's device, rounded as on one device |
| sum | takes each choice's row from the device of its expert, and adds them in the order of choices |

So a token's bits do not depend on the number of devices. Every device has equally many tokens, padding included. A return has
room for all of a token's choices from every device, because the sizes of an exchange are fixed when it is compiled.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from moe_jax.kernels.decode.add_norm import ExpertRows
from moe_jax.kernels.decode.route import TokenChoices

AXIS = "expert"
"""The mesh axis of a group's devices; all functions here run inside `jax.shard_map`."""


def gathered(of_device: Shaped[Array, "tokens ..."]) -> Shaped[Array, "tokens_of_group ..."]:
    """Returns the rows of all devices' tokens, in the order of devices."""
    return lax.all_gather(of_device, AXIS, tiled=True)


def size() -> int:
    """Returns the number of devices."""
    return lax.axis_size(AXIS)


def held_first(choice: TokenChoices, num_held: int) -> TokenChoices:
    """Renumbers the experts, so that this device's are the first `num_held`. Of the others, `is_chosen` has none."""
    num_columns, first = choice.experts.shape[1], num_held * lax.axis_index(AXIS)
    # A token without experts keeps the id past the last column.
    experts = jnp.where(choice.experts < num_columns, (choice.experts - first) % (num_held * size()), num_columns)
    number = jnp.arange(num_columns)
    is_chosen = jnp.where(number < num_held, choice.is_chosen[:, (number + first) % num_columns], 0)
    return TokenChoices(choice.weights, experts, is_chosen)


def returned(outputs: ExpertRows, choice: TokenChoices, num_held: int, k: int) -> tuple[TokenChoices, ExpertRows]:
    """Returns the choices of this device's own tokens, and their experts' rows, from all devices.

    Args:
      outputs: the rows that this device computed, for the tokens of all devices, of `held_first` choices.
      choice: the choices of the tokens of all devices.
    """
    devices = size()
    tokens = len(choice.experts) // devices
    sent = _in_order(outputs, k).reshape(devices, tokens * k, -1)
    rows = lax.all_to_all(sent, AXIS, 0, 0).reshape(devices * tokens * k, -1)
    first = tokens * lax.axis_index(AXIS)
    own: Any = TokenChoices(*(lax.dynamic_slice_in_dim(array, first, tokens) for array in choice))
    place = jnp.arange(tokens * k).reshape(tokens, k) + tokens * k * (own.experts[:, :k] // num_held)
    return own, ExpertRows(rows, own.weights, own.experts, None, None, place)


def _in_order(outputs: ExpertRows, k: int) -> Float[Array, "pairs hidden"]:
    """Returns a row for each choice, in the order of tokens and of their choices; an arbitrary one for another device's."""
    experts, place = outputs.experts[:, :k], outputs.row_of_pair
    if outputs.offsets is not None:
        of_token: Int[Array, "tokens _"] = jnp.arange(len(experts))[:, None]
        if outputs.place is not None:
            of_token = jnp.take_along_axis(outputs.place, experts, axis=1, mode="clip")
        place = outputs.offsets.at[experts].get(mode="clip") + of_token
    return outputs.rows if place is None else outputs.rows.at[place.ravel()].get(mode="clip")
