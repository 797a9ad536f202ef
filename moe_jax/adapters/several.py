"""Several adapters of one model, one active at a time; switching compiles nothing new."""

from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.adapters.load import Stack, put_stacks, read_adapter
from moe_jax.adapters.names import Target
from moe_jax.models.decoder import Decoder


class NamedAdapters:
    """The adapters that `load_adapters` added to a model.

    Attributes:
      names: the adapters' names.
      active: the name of the adapter that the model uses; None: only the weights.
    """

    def __init__(self, factors: Mapping[str, list[Stack]]):
        self._targets = [stack.target for stack in next(iter(factors.values()))]
        self._factors = {name: [_on_device(stack) for stack in stacks] for name, stacks in factors.items()}
        self.active: str | None = next(iter(factors))

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters' names, in the order in which they were given."""
        return tuple(self._factors)

    def use(self, name: str | None) -> None:
        """Activates an adapter, in place; None: only the weights, with changes of zero.

        All adapters have the same shapes, so functions compiled for the model are not compiled again.

        Raises:
          ValueError: there is no adapter of this name, or the model has lost its adapters.
        """
        if name is not None and name not in self._factors:
            raise ValueError(f"no adapter {name!r}; there are {', '.join(map(repr, self._factors))}")
        found = [target.found for target in self._targets if target.found is not None]
        if len(found) < len(self._targets):
            raise ValueError("the model has no adapters any more: they were merged or taken away")
        for adapter, (a, b) in zip(found, self._factors[name or self.names[0]], strict=True):
            adapter.a[...], adapter.b[...] = a, b if name is not None else jnp.zeros_like(b)
        self.active = name


def load_adapters(model: Decoder, adapters: Mapping[str, str | Path]) -> NamedAdapters:
    """Reads several adapters, adds them to the model, and freezes its weights. The first adapter is active.

        named = adapters.load_adapters(model, {"french": "runs/french/adapter", "code": "runs/code/adapter"})
        named.use("code")

    All are on the device. Each has the union of all targets, with the largest rank of each target, padded with zeros.

    Args:
      adapters: {name: a folder or hub id}.

    Raises:
      FileNotFoundError, ValueError: as `load_adapter`, of any of them; or `adapters` is empty. The model is then unchanged.
    """
    if not adapters:
        raise ValueError("no adapters to load: give {name: folder}")
    files = {name: read_adapter(model, folder) for name, folder in adapters.items()}
    for what, of_file in (
        ("modules_to_save", lambda file: file.whole),
        ("trainable_token_indices", lambda file: file.rows.tokens),
    ):
        if trained := [name for name, file in files.items() if of_file(file)]:
            raise ValueError(f"{', '.join(map(repr, trained))} has {what}, which cannot be switched: load it alone")
    read = {name: {stack.target: stack for stack in file.stacks} for name, file in files.items()}
    targets = dict.fromkeys(target for stacks in read.values() for target in stacks)
    ranks = {target: max(_rank(stacks[target]) for stacks in read.values() if target in stacks) for target in targets}
    padded = {name: [_padded(stacks.get(target), target, ranks[target]) for target in targets] for name, stacks in read.items()}
    put_stacks(model, next(iter(padded.values())))
    return NamedAdapters(padded)


def _rank(stack: Stack) -> int:
    """Returns the rank of a stack."""
    return stack.a.shape[-2]


def _padded(stack: Stack | None, target: Target, rank: int) -> Stack:
    """Returns the stack with zeros up to this rank; all zeros for a target that an adapter does not change."""
    padded = Stack.zeros(target, rank)
    if stack is not None:
        padded.a[..., : _rank(stack), :], padded.b[..., : _rank(stack)] = stack.a, stack.b
    return padded


def _on_device(stack: Stack) -> tuple[Float[Array, "*stack rank in"], Float[Array, "*stack out rank"]]:
    """Returns the factors on the device, laid out like the model's adapter."""
    assert stack.target.found is not None
    kept = stack.target.found
    return jnp.asarray(stack.a, device=kept.a[...].sharding), jnp.asarray(stack.b, device=kept.b[...].sharding)
