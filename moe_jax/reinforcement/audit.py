"""The audit of exact mode: compares what the engine returned with `strict_log_probs`' pass over whole rows, bit for bit."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Float, Int, Integer

from moe_jax.models.decoder import Decoder
from moe_jax.parallel.layout import mesh_of
from moe_jax.reinforcement.samples import Group
from moe_jax.serving.placement import on_each
from moe_jax.serving.request import KvDtype
from moe_jax.serving.strict_log_probs import strict_pass

AUDITED_ROWS = 2
"""Rows that a strict pass computes at once on a device, and rows of each device that the audit of a step computes."""

Arrays = dict[str, np.ndarray]


def audit(
    model: Decoder,
    batch: Arrays,
    groups: Sequence[Group],
    rows: Int[np.ndarray, " audited"],
    temperature: float,
    kv_dtype: KvDtype = "model",
) -> tuple[dict[str, float], str | None]:
    """Compares the sampler's log-probabilities and experts with the strict pass, for the tokens of some rows.

    If the model has experts and the batch has none, the strict pass adds them to it. All its rows must be audited then.

    Args:
      batch: rows of `groups`, as `policy_rows` packs them.
      rows: the numbers of the rows.
      temperature: the sampling temperature.
      kv_dtype: the sampler's (`EngineLimits`).

    Returns:
      The metrics `audited_tokens`, `mismatch_tokens` and `mismatch_max`, and a sentence on the first mismatch, None if there is
      none.
    """
    log_probs, experts = strict_rows(model, batch, rows, temperature, kv_dtype)
    learned, sampled = batch["loss_mask"][rows, :-1] != 0, batch["sampled_log_probs"][rows, :-1]
    wrong = learned & (log_probs != sampled)
    largest = float(np.abs(log_probs - sampled, where=learned, out=np.zeros_like(sampled)).max(initial=0))
    if experts is not None and "expert_ids" in batch:
        segments = batch["segment_ids"][rows]
        is_read = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)
        wrong |= is_read & (experts != batch["expert_ids"][rows]).any((2, 3))[:, :-1]
    elif experts is not None:
        dtype = np.uint8 if model.config.experts is not None and model.config.experts.num_experts <= 256 else np.uint16
        batch["expert_ids"] = np.zeros((len(batch["tokens"]), *experts.shape[1:]), dtype)
        batch["expert_ids"][rows] = experts
    metrics = {"audited_tokens": float(learned.sum()), "mismatch_tokens": float(wrong.sum()), "mismatch_max": largest}
    if not wrong.any():
        return metrics, None
    row, place = np.argwhere(wrong)[0]
    name = _name_of(batch, groups, rows[row], place)
    values = f"{sampled[row, place]:.9g} by the engine, {log_probs[row, place]:.9g} by strict_log_probs"
    if experts is not None and (not learned[row, place] or sampled[row, place] == log_probs[row, place]):
        values = f"experts {batch['expert_ids'][rows[row], place].tolist()} by the engine, {experts[row, place].tolist()}"
    return metrics, f"{int(wrong.sum())} of {int(learned.sum())} audited tokens differ, the first in {name}: {values}"


def strict_rows(
    model: Decoder, batch: Arrays, rows: Int[np.ndarray, " audited"], temperature: float, kv_dtype: KvDtype = "model"
) -> tuple[Float[np.ndarray, "audited seq-1"], Integer[np.ndarray, "audited seq layers choices"] | None]:
    """Returns the log-probabilities and the experts of some rows by the strict pass; no experts if the model has none."""
    graphdef, weights = nnx.split(model)
    mesh, segments = mesh_of(weights), batch["segment_ids"]
    runs = 1 + int((segments[:, 1:] != segments[:, :-1]).sum(axis=1).max())
    # The number of segments is a part of the program: it grows in large steps.
    max_segments = next(2 * 4**i for i in range(segments.shape[1]) if 2 * 4**i >= runs)
    found, at_once = [], AUDITED_ROWS * (1 if mesh is None else mesh.size)
    for first in range(0, len(rows), at_once):
        chosen = np.resize(rows[first : first + at_once], at_once)
        sizes = graphdef, max_segments, temperature, kv_dtype, mesh
        log_probs, experts = _strict_pass(*sizes, weights, (batch["tokens"][chosen], segments[chosen]))
        found.append((np.asarray(log_probs), None if experts is None else np.asarray(experts)))
    values, ids = zip(*found, strict=True)
    return np.concatenate(values)[: len(rows)], None if ids[0] is None else np.concatenate(ids)[: len(rows)]


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _strict_pass(
    graphdef: nnx.GraphDef,
    max_segments: int,
    temperature: float,
    kv_dtype: KvDtype,
    mesh: Mesh | None,
    weights: nnx.State,
    arrays: tuple[Int[jax.Array, "rows seq"], Int[jax.Array, "rows seq"]],
) -> tuple[Float[jax.Array, "rows seq-1"], Int[jax.Array, "rows seq layers choices"] | None]:
    options: dict[str, Any] = dict(max_segments=max_segments, temperature=temperature, kv_dtype=kv_dtype)

    def of_rows(weights: nnx.State, arrays: tuple[jax.Array, jax.Array]):
        log_probs, experts = strict_pass(nnx.merge(graphdef, weights), *map(jnp.asarray, arrays), **options)
        return log_probs, None if experts is None else jnp.moveaxis(experts, 0, 2)

    return on_rows(mesh, of_rows)(weights, arrays)


def on_rows(mesh: Mesh | None, function: Callable) -> Callable:
    """Returns a program of weights and arrays [rows, ...], which computes rows of its own on each device of a mesh.

    Each device has all weights and runs the program of one device, so its bits are the same.
    """
    rows = PartitionSpec(None if mesh is None else mesh.axis_names)
    return on_each(mesh, function, (PartitionSpec(), rows), rows)


def _name_of(batch: Arrays, groups: Sequence[Group], row: int, place: int) -> str:
    number = batch["sample"][row, place]
    group, i = [(group, i) for group in groups for i in range(len(group.samples))][number]
    # The token is predicted at the position before it.
    position = place + 1 - int(np.argmax(batch["sample"][row] == number)) - len(group.prompt_tokens)
    where = f"token {position} of the answer" if position >= 0 else f"token {position + len(group.prompt_tokens)} of the prompt"
    return f"group {group.key}, sample {i}, {where}"
