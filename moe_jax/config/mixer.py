"""Mixers: what each kind of attention says of itself, so that no other code asks for an architecture's class."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

Shapes = tuple[tuple[int, ...], ...]


class Mixer(Protocol):
    """The part of a layer in which a token sees others. A recurrent kind has a state of each sequence, and keeps no tokens."""

    name: ClassVar[str]
    """The name in messages, for example "attention"."""

    @property
    def of_token(self) -> Shapes:
        """Shapes of the arrays that a layer's cache keeps of each token."""

    @property
    def of_sequence(self) -> Shapes:
        """Shapes of the arrays (f32) that a layer keeps of each sequence, and overwrites with every token."""


@dataclass(frozen=True, kw_only=True)
class HeadsSpec:
    """Attention of query heads to equally many or fewer heads of keys and values (`layers.attention`).

    Attributes:
      heads, kv_heads: query heads, and heads of keys and values.
      key_dim: width of a query head and of a key head.
      value_dim: width of a value head.
      rotary_dim: dimensions of a head that the rotary embedding rotates.
      biases: True if projections have biases.
      head_norms: True if each query and key head has an RMSNorm.
      sinks: True if each query head has a score of no token, which takes a part of the weights.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    rotary_dim: int
    biases: bool = False
    head_norms: bool = False
    sinks: bool = False

    name: ClassVar[str] = "attention"
    of_sequence: ClassVar[Shapes] = ()

    @property
    def of_token(self) -> Shapes:
        """Shapes of a token's keys and values."""
        return (self.kv_heads, self.key_dim), (self.kv_heads, self.value_dim)


@dataclass(frozen=True, kw_only=True)
class LatentSpec(HeadsSpec):
    """Attention to keys and values that are expanded from latents (`layers.latent_attention`); the latents are kept.

    Attributes:
      rank: width of a latent without its rotary key.
      query_rank: width of the latent of queries; 0 if one matrix makes the queries.
    """

    rank: int
    query_rank: int

    name: ClassVar[str] = "latent attention"

    @property
    def of_token(self) -> Shapes:
        """Shape of a token's latent, which the cache stores instead of keys and values."""
        return ((self.rank + self.rotary_dim,),)
