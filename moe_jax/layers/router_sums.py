"""Router statistics for the balancing losses and the metrics: sums over tokens, added up over micro-batches and devices."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe_jax.kernels.shapes import vary_as
from moe_jax.layers.balance import Sequences, sequence_balance
from moe_jax.layers.spread import Exchange


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RouterSums:
    """Router statistics summed over the valid tokens of one layer, or of several layers stacked on a leading axis.

    To add a statistic, add a field here and its formula in `of`. All other code treats fields the same.

    Attributes:
      expert_load: number of tokens that each expert received.
      probability_sum: sum of the router's probabilities of each expert.
      z_loss_sum: sum of logsumexp(logits)^2.
      num_dropped: number of choices that no expert computed for lack of capacity; 0 unless `ExpertParallel.drop` is set.
      num_rounds: rounds of the exchange with other devices' experts (`parallel.expert.Exchange`), summed over the devices;
        1 without an exchange.
      num_shadows: experts that were copied to all devices for the call, summed over the devices; 0 without an exchange.
      entropy_sum: sum of the entropies of the tokens' probabilities, in nats.
      sequence_balance_sum: sum over the sequences of `balance.sequence_balance`; 0 unless `of` was given `Sequences`.
      num_tokens: number of valid tokens, the same for every layer.
      num_sequences: number of sequences in `sequence_balance_sum`, the same for every layer.
    """

    expert_load: Int[Array, "*layers experts"]
    probability_sum: Float[Array, "*layers experts"]
    z_loss_sum: Float[Array, "*layers"]
    num_dropped: Int[Array, "*layers"]
    num_rounds: Int[Array, "*layers"]
    num_shadows: Int[Array, "*layers"]
    entropy_sum: Float[Array, "*layers"]
    sequence_balance_sum: Float[Array, "*layers"]
    num_tokens: Float[Array, ""]
    num_sequences: Float[Array, ""]

    @classmethod
    def of(
        cls,
        probabilities: Float[Array, "tokens experts"],
        logits: Float[Array, "tokens experts"],
        experts: Int[Array, "tokens k"],
        valid: Bool[Array, "tokens"] | Sequences | None = None,
    ) -> "RouterSums":
        """Computes the sums of one layer from the router's outputs.

        Args:
          probabilities: the router's scores of all experts, divided by their sum.
          logits: the router's logits.
          experts: the experts that each token uses, not negative. Ids equal to the number of experts or above are not counted.
          valid: tokens that count; all if None. `Sequences` also defines their documents, for the sequence-wise loss.
        """
        if valid is None:
            valid = jnp.ones(logits.shape[0], bool)
        valid, sequences = (valid.valid, valid) if isinstance(valid, Sequences) else (valid, None)
        counted = valid[:, None]
        ones = jnp.broadcast_to(counted, experts.shape).astype(jnp.int32)
        balance = jnp.zeros((), logits.dtype)
        return cls(
            expert_load=jnp.zeros(logits.shape[1], jnp.int32).at[experts].add(ones),
            probability_sum=_sum_of_counted(counted, probabilities),
            z_loss_sum=jnp.where(valid, jnp.square(jax.nn.logsumexp(logits, axis=-1)), 0).sum(),
            num_dropped=jnp.zeros((), jnp.int32),
            num_rounds=jnp.ones((), jnp.int32),
            num_shadows=jnp.zeros((), jnp.int32),
            entropy_sum=jnp.where(counted, jax.scipy.special.entr(jax.lax.stop_gradient(probabilities)), 0).sum(),
            sequence_balance_sum=balance if sequences is None else sequence_balance(probabilities, experts.shape[1], sequences),
            num_sequences=_num_sequences(sequences),
            num_tokens=vary_as(_num_tokens(valid), logits),
        )

    @classmethod
    def of_no_layer(cls, num_tokens: int) -> "RouterSums":
        """Returns empty sums (zero layers) for a dense model; `with_counts` fills in the counts."""
        scores, experts = (jax.ShapeDtypeStruct((num_tokens, 0), dtype) for dtype in (jnp.float32, jnp.int32))
        of_a_layer = jax.eval_shape(cls.of, scores, scores, experts)
        return jax.tree.map(lambda a: jnp.zeros((0, *a.shape), a.dtype), of_a_layer)

    def with_counts(self, valid: Bool[Array, "*batch"], sequences: Sequences | None) -> "RouterSums":
        """Returns the sums with the counts of tokens and documents filled in, computed once for all layers.

        If the mask is known at compile time, XLA then divides by constants.
        """
        return replace(self, num_tokens=_num_tokens(valid), num_sequences=_num_sequences(sequences))

    @classmethod
    def stack(cls, layers: Sequence["RouterSums"]) -> "RouterSums":
        """Stacks the sums of single layers of one call along a new leading axis; at least one."""
        return _with_counts_of(layers[0], jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers))

    @classmethod
    def concatenate(cls, stacks: Sequence["RouterSums"]) -> "RouterSums":
        """Joins stacked layers, at least one stack. The two counts come from the first stack."""
        # A stack without layers has zero experts, so its load cannot be concatenated with others.
        with_layers = [layers for layers in stacks if len(layers.z_loss_sum)] or stacks[:1]
        arrays = [jax.tree.map(jnp.atleast_1d, layers) for layers in with_layers]
        return _with_counts_of(stacks[0], jax.tree.map(lambda *parts: jnp.concatenate(parts), *arrays))

    def with_exchange(self, exchange: Exchange) -> "RouterSums":
        """Returns the sums with the statistics of expert dispatch (rounds, shadow experts) filled in."""
        return replace(self, num_dropped=exchange.num_dropped, num_rounds=exchange.num_rounds, num_shadows=exchange.num_shadows)

    def __add__(self, other: "RouterSums") -> "RouterSums":
        """Adds the sums over other tokens in the same layers."""
        return jax.tree.map(jnp.add, self, other)

    def psum(self, mesh_axes: str | tuple[str, ...]) -> "RouterSums":
        """Sums over the devices along `mesh_axes`, over which tokens are split; inside `jax.shard_map`.

        The losses of the result are the losses of the whole batch on one device, not means of the devices' own losses.
        """
        return jax.tree.map(lambda a: jax.lax.psum(a, mesh_axes), self)


# The mask is the only residual: without the checkpoint a layer saves it broadcast over experts, and an array of zeros.
@partial(jax.checkpoint, prevent_cse=False)
def _sum_of_counted(counted: Bool[Array, "tokens 1"], probabilities: Float[Array, "tokens experts"]) -> Float[Array, "experts"]:
    return jnp.where(counted, probabilities, 0).sum(axis=0)


def _with_counts_of(first: RouterSums, layers: RouterSums) -> RouterSums:
    """Returns `layers` with the two counts of one call, without a layers axis (of stacked counts, the first layer's)."""
    return replace(layers, num_tokens=first.num_tokens.reshape(-1)[0], num_sequences=first.num_sequences.reshape(-1)[0])


def _num_tokens(valid: Bool[Array, "*batch"]) -> Float[Array, ""]:
    return valid.sum().astype(jnp.float32)


def _num_sequences(sequences: Sequences | None) -> Float[Array, ""]:
    return jnp.zeros((), jnp.float32) if sequences is None else sequences.share(jnp.float32).sum()
