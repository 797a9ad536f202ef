"""Ring attention (Liu et al., 2023, https://arxiv.org/abs/2310.01889): keys travel around the devices, queries stay.

Step 0 computes with a device's own keys. Later steps compute with the keys of preceding devices, while the keys of the next
step travel. Step s of `n` steps, with one attention kernel forward and two backward:

    forward   kernel                          travels during the kernel
    0         out of own keys                 keys of step 1
    s         out of the keys of step s       keys of step s+1

    backward  kernel                          travels during the kernel
    0         dq of own keys                  keys of step 1
    s         dq of the keys of step s        dk and dv of step s-1: on to the devices of step s, or home
    s         dk, dv of the keys of step s    keys of step s+1
    n         dk, dv of own keys              dk and dv of the last step: home

XLA keeps one NCCL transfer in flight during a kernel, so over NCCL a step holds the keys of one device. Peer-to-peer copies
(`hops="copies"`, `parallel.collectives.hops`) arrive from many devices at once. Then one kernel computes with the keys of
several devices, up to MAX_KEY_BYTES_PER_STEP. Each device forwards its keys by that number of devices. Fewer steps read and
write the f32 accumulators less often, and their tiles fill the cores better.

A query sees one interval of the sequence. In every layout of `sequence` that is one interval of a step's tokens, once these are
in sequence order. So no masks and no segment ids travel. A step is one kernel without a branch, which skips the blocks of keys
that no query sees.

For c tokens in bf16, 4*c*kv_heads*head_dim bytes of k and v travel from each device to every other, and again in the backward
pass. dk and dv need 8*c*kv_heads*head_dim bytes in f32. They are sent with their keys, and return after the last step. The
kernels accumulate out, dq, dk and dv in f32.

If keys and values are expanded from something smaller (latent attention), that travels instead. Each device expands the
received part, and propagates the gradients through the expansion before they leave.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moe_jax.kernels.attention import partial as partial_attention
from moe_jax.kernels.precision import widened
from moe_jax.layers.attend import KV, Expand, keys_and_values
from moe_jax.layers.attend import Expansion as Expansion
from moe_jax.parallel.choices import Hops
from moe_jax.parallel.collectives.hops import hop
from moe_jax.parallel.sequence.layouts import Layout, join_in_order, split_in_order, token_indices, tokens_before

Message = tuple[Float[Array, "..."], ...]
"""Arrays that travel together: a `KV`, or all its numbers in one array."""

MAX_KEY_BYTES_PER_STEP = 2**28
"""Upper bound on the bytes of other devices' k and v in one ring step with peer-to-peer copies. A step holds at least one
device's keys, even if they are larger."""

RingStep = list[int]
"""The distances to the preceding devices whose keys one kernel computes with; [0] is the device itself."""


@dataclass(frozen=True)
class SequenceRing:
    """A ring of devices over a mesh axis, with the sequence layout, the attention backend and the transfer method."""

    axis_name: str
    layout: Layout
    scale: float
    backend: str
    expand: Expand | None = None
    hops: Hops = "nccl"

    @property
    def size(self) -> int:
        """The number of devices."""
        return lax.axis_size(self.axis_name)

    def steps(self, kv: KV, weights) -> list[RingStep]:
        """Returns which devices' keys each ring step computes with: the device itself first, then all others."""
        keys = jax.eval_shape(partial(keys_and_values, self.expand), weights, kv)
        per_step = devices_per_ring_step(sum(a.size * a.dtype.itemsize for a in keys), self.hops)
        others = range(1, self.size)
        return [[0], *(list(others[i : i + per_step]) for i in range(0, len(others), per_step))]

    def pack(self, arrays: KV) -> Message:
        """Concatenates arrays into one NCCL message: XLA would overlap only one of two transfers with a kernel. Peer-to-peer
        copies send the arrays as they are.
        """
        return arrays if self.hops == "copies" else (jnp.concatenate([a.reshape(-1) for a in arrays]),)

    def unpack(self, message: Message, like: KV) -> KV:
        """Inverts `pack`; `like` has the shapes."""
        if self.hops == "copies":
            return message
        parts = jnp.split(message[0], list(accumulate(a.size for a in like[:-1])))
        return tuple(part.reshape(a.shape) for part, a in zip(parts, like, strict=True))

    def send_on(self, messages: list[Message], step: RingStep, following: RingStep) -> list[Message]:
        """Forwards this step's messages (keys or their gradients) to the devices that need them in the next step.

        Returns the messages received for the following step.
        """
        sources = [min(i, len(step) - 1) for i in range(len(following))]
        return [self._hop(messages[i], distance - step[i]) for i, distance in zip(sources, following, strict=True)]

    def send_home(self, messages: list[Message], step: RingStep, following: RingStep) -> list[Message]:
        """Returns messages that are not needed in the next step to the devices that own them; returns those received."""
        return [self._hop(messages[i], self.size - step[i]) for i in range(len(following), len(step))]

    def join(self, parts: list[KV], step: RingStep) -> KV:
        """Merges the tokens of a step's devices into sequence order."""
        return tuple(join_in_order(list(arrays), self._devices(step), self.layout) for arrays in zip(*parts, strict=True))

    def split(self, whole: KV, step: RingStep) -> list[KV]:
        """Inverts `join`."""
        return list(zip(*(split_in_order(a, self._devices(step), self.layout) for a in whole), strict=True))

    def visible(self, first_token: Int[Array, "batch seq"], step: RingStep) -> partial_attention.Bounds:
        """Returns the interval (first, last) of a step's tokens that each query sees; empty if last < first."""
        length = first_token.shape[1]

        def tokens_of_step_before(index: Array) -> Array:
            count = partial(tokens_before, index, length, num_shards=self.size, layout=self.layout)
            return sum((count(device=device) for device in self._devices(step)), jnp.int32(0))

        end = token_indices(length, lax.axis_index(self.axis_name), self.size, self.layout) + 1
        first = tokens_of_step_before(first_token)
        return first, jnp.broadcast_to(tokens_of_step_before(end) - 1, first_token.shape)

    def _devices(self, step: RingStep) -> list[Int[Array, ""]]:
        return [(lax.axis_index(self.axis_name) - distance) % self.size for distance in step]

    def _hop(self, message: Message, distance: int) -> Message:
        """Returns the message of the device `distance` before this one."""
        return tuple(hop(a, self.axis_name, distance) for a in message)


def devices_per_ring_step(size: int, hops: Hops) -> int:
    """Returns the maximum number of other devices in a ring step, if one device has `size` bytes of k and v."""
    return max(1, MAX_KEY_BYTES_PER_STEP // max(1, size)) if hops == "copies" else 1


class AttentionResiduals(NamedTuple):
    """The residuals of ring attention."""

    q: Float[Array, "batch seq heads head_dim"]
    kv: KV
    weights: Any
    first_token: Int[Array, "batch seq"]
    out: Float[Array, "batch seq heads value_dim"]
    lse: Float[Array, "batch heads seq"]
    """log sum exp of each query's scores."""


class KVGradients(NamedTuple):
    """Gradients of `kv`, and of the weights that expand latents; None before anything was added."""

    kv: KV | None
    weights: Any


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def ring_attention(
    q: Float[Array, "batch seq heads head_dim"],
    kv: KV,
    weights,
    first_token: Int[Array, "batch seq"],
    ring: SequenceRing,
) -> Float[Array, "batch seq heads value_dim"]:
    """Computes attention of local queries to tokens first_token[i] .. own index of the whole sequence, in q's dtype.

    Call it inside `jax.shard_map`; all arrays vary over the ring's axis. `kv` and `weights` are the arguments of `ring.expand`.
    Without `ring.expand`, `kv` is k [batch, seq, kv_heads, head_dim] and v [batch, seq, kv_heads, value_dim], and `weights` is
    (). Residuals: the arguments, out and its logsumexp.
    """
    return _forward(q, kv, weights, first_token, ring)[0]


def _forward(q, kv: KV, weights, first_token, ring: SequenceRing) -> tuple[Array, AttentionResiduals]:
    steps = ring.steps(kv, weights)
    arrived, accumulators = [ring.pack(kv)], None
    for step, following in zip(steps, [*steps[1:], []], strict=True):
        here = kv if step == [0] else ring.join([ring.unpack(message, kv) for message in arrived], step)
        arrived = ring.send_on(arrived, step, following)
        k, v = keys_and_values(ring.expand, weights, here)
        accumulators = partial_attention.forward(
            q,
            k,
            v,
            ring.visible(first_token, step),
            scale=ring.scale,
            backend=ring.backend,
            previous=accumulators,
            out_dtype=None if following else q.dtype,
        )
        arrived, accumulators = _start_after(arrived, accumulators)
    assert accumulators is not None
    out, lse = checkpoint_name(accumulators, "attention")
    return out, AttentionResiduals(q, kv, weights, first_token, out, lse)


def _backward(ring: SequenceRing, residuals: AttentionResiduals, dout):
    q, kv, weights, first_token, out, lse = residuals
    delta = jnp.einsum("bqhe,bqhe->bhq", dout.astype(lse.dtype), out.astype(lse.dtype))
    own, *steps = ring.steps(kv, weights)

    def gradient(kernel, step: RingStep, keys, previous, **options):
        bounds = ring.visible(first_token, step)
        options |= dict(scale=ring.scale, backend=ring.backend, previous=previous)
        k, v = keys
        return kernel(partial_attention.BackwardInputs(q, k, v, dout, lse, delta), bounds, **options)

    def query_gradient(step: RingStep, here: KV, previous):
        keys, is_last = keys_and_values(ring.expand, weights, here), step == [own, *steps][-1]
        dtype = q.dtype if is_last else None
        return gradient(partial_attention.gradient_of_queries, step, keys, previous, out_dtype=dtype)

    def kv_gradients(step: RingStep, here: KV, previous: KVGradients) -> KVGradients:
        key_gradients = partial(gradient, partial_attention.gradients_of_keys, step)
        return gradients_of_kv(ring.expand, weights, here, key_gradients, previous)

    # The order of the module's table. Over NCCL XLA never has two transfers in flight: each needs its own kernel to overlap
    # with.
    travelling: list[KV] = []
    """dk and dv of the previous step's devices, in f32."""
    at_home: list[KV] = []
    """dk and dv of this device's keys, from the steps of all other devices."""
    dweights = None
    arrived = ring.send_on([ring.pack(kv)], own, steps[0]) if steps else []
    dq = query_gradient(own, kv, None)
    for before, step, following in zip([own, *steps], steps, [*steps[1:], []], strict=False):
        (arrived, travelling), dq = _start_after((arrived, travelling), dq)
        here = ring.join([ring.unpack(message, kv) for message in arrived], step)
        if travelling:
            at_home += ring.send_home(travelling, before, step)
            travelling = ring.send_on(travelling, before, step)
        dq = query_gradient(step, here, dq)
        (arrived, travelling), dq = _start_after((arrived, travelling), dq)
        arrived = ring.send_on(arrived, step, following)
        previous = ring.join([ring.unpack(message, kv) for message in travelling], step) if travelling else None
        of_step, dweights = kv_gradients(step, here, KVGradients(previous, dweights))
        assert of_step is not None
        travelling = [ring.pack(part) for part in ring.split(of_step, step)]
    kv, (dq, travelling) = _start_after(kv, (dq, travelling))
    if travelling:
        at_home += ring.send_home(travelling, steps[-1], [])
    dkv, dweights = kv_gradients(own, kv, KVGradients(None, dweights))
    for message in at_home:
        dkv = _add(dkv, ring.unpack(message, kv))
    return dq, as_dtypes_of(kv, dkv), as_dtypes_of(weights, dweights), None


ring_attention.defvjp(_forward, _backward)


def gradients_of_kv(
    expand: Expand | None, weights, kv: KV, key_gradients: Callable, previous: KVGradients
) -> KVGradients:  # fmt: skip
    """Returns the gradients of (kv, weights), added to `previous` in f32; None for weights without gradients (`has_gradient`).

    `key_gradients(keys, previous)` returns the gradients of keys and values, added to `previous`. With `expand` they are
    propagated through it, and are in its arguments' dtypes before they are added.
    """
    if expand is None:
        return KVGradients(key_gradients(kv, previous.kv), ())
    trained = jax.tree.map(lambda a: a if has_gradient(a) else None, weights)

    def of_trained(trained, *kv: Array) -> tuple[Array, Array]:
        return expand(jax.tree.map(lambda a, given: a if given is None else given, weights, trained), *kv)

    keys, pullback = jax.vjp(of_trained, trained, *kv)
    own_weights, *own_kv = pullback(as_dtypes_of(keys, key_gradients(keys, None)))
    return KVGradients(_add(previous.kv, tuple(own_kv)), _add(previous.weights, own_weights))


def has_gradient(a: Array) -> bool:
    """Returns False for integer arrays and 8-bit codes, which have no gradients to sum."""
    dtype = jnp.result_type(a)
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1


def _add(previous, gradients):
    """Returns the sum in f32 of two equal pytrees; `previous` may be None."""
    wide = jax.tree.map(widened, gradients)
    return wide if previous is None else jax.tree.map(jnp.add, previous, wide)


def as_dtypes_of(like, arrays):
    """Casts each array to the dtype of its counterpart in `like`; None stays None."""
    return jax.tree.map(lambda like, a: None if a is None else a.astype(like.dtype), like, arrays)


def _start_after(later, earlier):
    """Returns both unchanged. Operations that use `later` start after `earlier` is computed."""
    return lax.optimization_barrier((later, earlier))
