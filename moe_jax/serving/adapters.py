"""Several adapters (LoRA) of one engine: a table on the device, and the names under which requests choose from it.

The table has the factors of at most `EngineLimits.max_adapters` adapters, for each projection of attention. A step multiplies
its tokens by the first factors of all adapters side by side. It then zeroes the columns of adapters that are not the token's
own, and multiplies by the second factors. So rows of any adapters, and rows without one, share a step. Punica
(https://arxiv.org/abs/2310.18547) and S-LoRA (https://arxiv.org/abs/2311.03285) serve adapters in one batch too.
"""

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moe_jax.adapters.load import Stack, check_adapter
from moe_jax.adapters.names import targets_of, whole_modules
from moe_jax.adapters.token_rows import trained_tables
from moe_jax.checkpoint.hf_names import host_array
from moe_jax.config import ModelConfig
from moe_jax.kernels.low_rank import LowRankOfRows, low_rank_map
from moe_jax.layers.lora import AdapterOfRows
from moe_jax.models.decoder import Decoder


class NamedAdapter(NamedTuple):
    """An adapter in the table."""

    name: str
    number: int
    """Its place in the table."""
    version: int
    """A number that no other load has: pages of an adapter are not shared with another one that gets its name or place."""
    source: str
    """The folder or hub id; "a model" if it was not read from files."""


class AdapterTable:
    """The names of an engine's adapters. The factors are on its devices.

    An adapter that was unloaded, or whose name has another one now, keeps its place until no request uses it.

    Attributes:
      lock: held while a method is called, until requests that name an adapter are added.
    """

    def __init__(self, room: int):
        self.lock = threading.Lock()
        self._places: list[NamedAdapter | None] = [None] * room
        self._named: dict[str, NamedAdapter] = {}
        """The least recently used first. Each change makes a new dict: `adapters` needs no lock."""
        self._versions = itertools.count(1)

    @property
    def adapters(self) -> list[NamedAdapter]:
        """The adapters that requests may name, by name."""
        return sorted(self._named.values())

    def find(self, name: str) -> NamedAdapter:
        """Returns the adapter of this name for a request.

        Raises:
          ValueError: there is no such adapter.
        """
        if not self._places:
            raise ValueError(f"adapter {name!r} needs an engine with EngineLimits(max_adapters=...) of at least 1; it has 0")
        if (found := self._named.get(name)) is None:
            loaded = ", ".join(repr(each.name) for each in self.adapters) or "none"
            raise ValueError(f"adapter {name!r} is not loaded; loaded are: {loaded}")
        self.forget(name)
        self._named = {**self._named, name: found}
        return found

    @contextlib.contextmanager
    def placed(self, name: str, source: str, in_use: set[NamedAdapter | None]) -> Iterator[NamedAdapter]:
        """Yields a new adapter with a place that no request uses. Requests may name it when the block has ended.

        It prefers a place without a name, then that of the adapter with this name, then the least recently used one.

        Raises:
          RuntimeError: requests use all places.
        """
        order = list(self._named.values())

        def worth(number: int) -> int:
            old = self._places[number]
            return -2 if old not in order else -1 if old.name == name else order.index(old)

        free = [number for number, old in enumerate(self._places) if old is None or old not in in_use]
        if not free:
            raise RuntimeError(
                f"adapter {name!r} finds no place: running requests use all {len(self._places)} adapters of "
                "EngineLimits(max_adapters=...); try again when some have ended, or raise the limit"
            )
        number = min(free, key=worth)
        if (old := self._places[number]) is not None and old in order:
            self.forget(old.name)
        self._places[number] = None
        yield (adapter := NamedAdapter(name, number, next(self._versions), source))
        self._places[number] = adapter
        self.forget(name)
        self._named = {**self._named, name: adapter}

    def forget(self, name: str) -> None:
        """Removes a name, if it is there."""
        self._named = {other: adapter for other, adapter in self._named.items() if other != name}


def read_stacks(config: ModelConfig, adapter: str | Path | Decoder, max_rank: int, source: str | None = None) -> list[Stack]:
    """Reads an adapter for the table: the factors of each projection of attention, on the host.

    Args:
      config: the config of the engine's model.
      adapter: a folder, a hub id, or a model with an adapter.
      source: the folder of the engine's weights, to warn of an adapter of others.

    Raises:
      FileNotFoundError, ValueError: as `adapters.load_adapter`. Also an adapter that changes more than attention, or of a rank
        above `max_rank`; or a model without an adapter, or of another config.
    """
    if isinstance(adapter, Decoder):
        where = "the model's adapter"
        if adapter.config != config:
            raise ValueError("the adapter's model must have the same config as the engine's; it has another one")
        stacks = [
            Stack(target, host_array(target.in_order(found.factors.a)), host_array(target.in_order(found.factors.b)))
            for target in targets_of(adapter)
            if (found := target.found) is not None
        ]
        further = {each.name for each in whole_modules(adapter) if each.is_trained} | set(trained_tables(adapter))
    else:
        read, where = check_adapter(config, adapter, source), str(adapter)
        stacks, further = read.stacks, {each.name for each, _ in read.whole} | set(read.rows.tokens)
    further |= {stack.target.kind for stack in stacks if stack.target.kind != "attention"}
    if further:
        raise ValueError(
            f"{where} changes {', '.join(sorted(further))}, but an adapter among several may change only attention: serve it "
            "alone, as the model's own adapter (from_pretrained(..., adapter=...), moe-jax serve --adapter)"
        )
    if not stacks:
        raise ValueError(f"{where} changes no matrix: give a folder of an adapter, or a model with one")
    if (rank := max(stack.a.shape[-2] for stack in stacks)) > max_rank:
        raise ValueError(f"{where} has rank {rank}, above max_adapter_rank={max_rank} of the engine's EngineLimits: raise it")
    return stacks


class Site(NamedTuple):
    """Projections of a layer's attention that share an input."""

    names: tuple[str, ...]
    num_in: int
    num_outs: tuple[int, ...]
    """Rows of each projection's matrix."""


class SiteFactors(NamedTuple):
    """The factors of all adapters in the table for a site; each projection has `max_adapter_rank` of the ranks."""

    a: Float[Array, "adapters ranks in"]
    b: Float[Array, "adapters ranks out"]
    """Zero where a rank and a column belong to different projections. Includes the scale."""


LayerFactors = dict[str, SiteFactors]
"""The factors of a layer, by the names of a site's projections."""

TOGETHER = "q_proj", "k_proj", "v_proj"


def sites_of(layer: nnx.State) -> list[Site]:
    """Returns the sites of a layer, from its arrays."""
    attention: Any = layer["self_attn"]
    shapes = {name: each["weight"].shape for name, each in attention.items() if "weight" in each}
    matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2}
    groups = [tuple(name for name in TOGETHER if name in matrices), *((name,) for name in matrices if name not in TOGETHER)]
    return [Site(names, matrices[names[0]][1], tuple(matrices[name][0] for name in names)) for names in groups if names]


def empty_factors(sites: list[Site], room: int, max_rank: int, dtype: DTypeLike) -> LayerFactors:
    """Returns zeros for the table of a layer."""
    sizes = {" ".join(site.names): (len(site.names) * max_rank, site.num_in, sum(site.num_outs)) for site in sites}
    return {
        key: SiteFactors(jnp.zeros((room, ranks, num_in), dtype), jnp.zeros((room, ranks, num_out), dtype))
        for key, (ranks, num_in, num_out) in sizes.items()
    }


def factors_of(stacks: Sequence[Stack], config: ModelConfig, sites: list[list[Site]], max_rank: int) -> list[LayerFactors]:
    """Returns an adapter's factors for each layer as the table has them, without the table's first axis, on the host."""
    likes = jax.eval_shape(lambda: [empty_factors(of_layer, 1, max_rank, jnp.float32) for of_layer in sites])
    found: list[LayerFactors] = jax.tree.map(lambda like: np.zeros(like.shape[1:], np.float32), likes)
    for stack in stacks:
        first = config.stages[int(str(stack.target.path[1]))].first_layer
        for number, (a, b) in enumerate(zip(stack.a, stack.b, strict=True), first):
            site = next(site for site in sites[number] if stack.target.name in site.names)
            place = site.names.index(stack.target.name)
            ranks = slice(place * max_rank, place * max_rank + len(a))
            columns = slice(sum(site.num_outs[:place]), sum(site.num_outs[: place + 1]))
            factors = found[number][" ".join(site.names)]
            factors.a[ranks], factors.b[ranks, columns] = a, b.T
    return found


@partial(jax.jit, donate_argnums=0)
def written(table: list[Array], number: Int[Array, ""], factors: list[Array]) -> list[Array]:
    """Returns the arrays of the table with an adapter's factors at its place, written in place."""
    return [all_of_them.at[number].set(own) for all_of_them, own in zip(table, factors, strict=True)]


class RowAdapters(NamedTuple):
    """The adapters of a step's tokens, in one layer."""

    factors: LayerFactors
    own: Int[Array, " tokens"]
    """The place of each token's adapter in the table; -1: none."""

    def part(self, site: str, x: Float[Array, "tokens in"], dtype: DTypeLike) -> Float[Array, "tokens out"]:
        """Returns the changes of a site's outputs; exactly 0 for a token without an adapter."""
        a, b = self.factors[site]
        of_rows = LowRankOfRows(a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1]).T, self._kept(a.shape[1]))
        return low_rank_map(x, of_rows, dtype)

    def attach(self, attention: Any) -> None:
        """Makes the projections of an attention module add their tokens' changes."""
        for key, (a, b) in self.factors.items():
            names, first = key.split(), 0
            rank = a.shape[1] // len(names)
            kept = self._kept(rank)[None]
            for place, name in enumerate(names):
                projection, ranks = getattr(attention, name), slice(place * rank, (place + 1) * rank)
                end = first + projection.weight.shape[0]
                own_a, own_b = a[:, ranks].reshape(-1, a.shape[-1]), b[:, ranks, first:end].reshape(-1, end - first)
                projection.lora = AdapterOfRows(LowRankOfRows(own_a, own_b.T, kept))
                first = end

    def _kept(self, ranks: int) -> Array:
        """Returns True [tokens, adapters * ranks] for the columns of each token's own adapter."""
        room = next(iter(self.factors.values())).a.shape[0]
        return jnp.repeat(self.own[:, None] == jnp.arange(room), ranks, axis=1)
