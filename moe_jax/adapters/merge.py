"""Adds a model's adapters to its weights, or removes them; writes the merged model and checks the files."""

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.adapters.add import lora_summary
from moe_jax.adapters.names import Change, changes_in_files, parameter_name, targets_of, whole_modules
from moe_jax.adapters.token_rows import extend_vocabulary, trained_tables
from moe_jax.checkpoint.hf_files import open_tensors
from moe_jax.checkpoint.hf_names import export, hf_tensors, host_array
from moe_jax.kernels.low_rank import LowRank
from moe_jax.layers.lora import Frozen, has_adapters
from moe_jax.layers.quantised import is_quantised
from moe_jax.models.decoder import Decoder
from moe_jax.parallel.pipeline.chunks import refuse_chunks


def merge_adapter(model: Decoder) -> None:
    """Adds each change to its matrix, in place, and removes the adapters: the model is plain and fully trainable again.

        W = round(f32(W) + scale * b a)

    Weights that were trained whole are rounded to their originals' dtype. One layer at a time is in f32. The old matrices are
    donated. Subtracting the change does not undo the rounding to bf16: keep the weights on disk.

    Raises:
      ValueError: the model has no adapters, or is split into a pipeline's chunks. Or its weights are quantised: most of a
        change would be rounded away.
    """
    if not has_adapters(model):
        raise ValueError("the model has no adapters to merge")
    refuse_chunks(nnx.state(model), "merge_adapter")
    if is_quantised(nnx.state(model, Frozen)):
        raise ValueError(
            "the weights are quantised, and would round most of the change away: load them whole, and merge into them"
        )
    for target in targets_of(model):
        if (adapter := target.found) is not None:
            weight = getattr(target.module, target.weight)
            setattr(target.module, target.weight, Frozen(_merged(weight.get_value(), adapter.factors)))
    for each in whole_modules(model):
        if each.is_trained:
            dtype = each.module.original.get_value().dtype
            each.module.original = Frozen(each.module.weight.get_value().astype(dtype))
            _restore(each.module)
    for table in trained_tables(model).values():
        table.weight = Frozen(table.token_rows.put(table.weight.get_value()))
    _remove_adapters(model)
    for _, module in list(nnx.iter_modules(model)):
        for name, variable in list(vars(module).items()):
            if isinstance(variable, Frozen):
                setattr(module, name, nnx.Param(variable.get_value()))


def without_adapter(model: Decoder) -> Decoder:
    """Returns the model without its adapters; it shares all arrays, so it costs no memory.

    It is the reference of preference losses. Its parameters stay frozen.
    """
    twin = nnx.merge(*nnx.split(model))
    _remove_adapters(twin)
    return twin


def merged_copy(model: Decoder) -> Decoder:
    """Returns the model with its changes added to their matrices, as `merge_adapter` does, and without adapters.

    It shares all other arrays. It is differentiable in the factors, as if the rounding were not there.

    Raises:
      AttributeError: an adapted matrix is quantised.
    """
    twin = nnx.merge(*nnx.split(model))
    for target in targets_of(twin):
        if (adapter := target.found) is not None:
            weight = getattr(target.module, target.weight)
            # Not `Frozen`, through which no gradient reaches the factors.
            setattr(target.module, target.weight, nnx.Param(_changed(weight.get_value(), adapter.factors)))
    for table in trained_tables(twin).values():
        table.weight = nnx.Param(table.token_rows.put(table.weight.get_value()))
    _remove_adapters(twin)
    return twin


def with_zero_changes(model: Decoder) -> Decoder:
    """Returns the model with changes of zero; it shares all arrays.

    With experts in FP8, adapters change where numbers are rounded. So this is, bit for bit, the model with which training of
    adapters begins.
    """
    twin = nnx.merge(*nnx.split(model))
    for target in targets_of(twin):
        if target.found is not None:
            target.found.scale = 0.0
    _restore_all(twin)
    return twin


def _remove_adapters(model: Decoder) -> None:
    for target in list(targets_of(model)):
        if target.found is not None:
            delattr(target.module, target.adapter)
    _restore_all(model)


def _restore_all(model: Decoder) -> None:
    """Restores the original weight of every module that is trained whole, or whose rows are trained."""
    for table in trained_tables(model).values():
        del table.token_rows
    for each in whole_modules(model):
        if each.is_trained:
            _restore(each.module)


def _restore(module: Any) -> None:
    module.weight = module.original
    del module.original


@jax.jit
def _changed(weight: Float[Array, "*layers out in"], factors: LowRank) -> Float[Array, "*layers out in"]:
    """Returns what `_merged` computes, in a new array."""

    def of_layer(layer: tuple[Array, LowRank]) -> Array:
        w, (a, b) = layer
        return (w.astype(jnp.float32) + jnp.matmul(b, a, precision=jax.lax.Precision.HIGHEST)).astype(w.dtype)

    stacked = weight.reshape(len(factors.a), *weight.shape[1 - factors.a.ndim :])
    return jax.lax.map(of_layer, (stacked, factors)).reshape(weight.shape)


@partial(jax.jit, donate_argnums=0)
def _merged(weight: Float[Array, "*layers out in"], factors: LowRank) -> Float[Array, "*layers out in"]:
    """Adds b a to the matrices of each layer in turn; embedding and head are one layer."""
    stacked = weight.reshape(len(factors.a), *weight.shape[1 - factors.a.ndim :])

    def add(layer: Array, weight: Array) -> Array:
        w, a, b = (jax.lax.dynamic_index_in_dim(array, layer, keepdims=False) for array in (weight, *factors))
        changed = w.astype(jnp.float32) + jnp.matmul(b, a, precision=jax.lax.Precision.HIGHEST)
        return jax.lax.dynamic_update_index_in_dim(weight, changed.astype(weight.dtype), layer, 0)

    return jax.lax.fori_loop(0, len(stacked), add, stacked).reshape(weight.shape)


def write_merged(
    load: Callable[[], Decoder], adapt: Callable[[Decoder], Any], save: Callable[..., None], target: str, **options: Any
) -> None:
    """Writes the merged model, and prints what was adapted and how well the files agree with base + adapter.

    Args:
      load: returns the model without adapters. It is called again for the comparison, after the first model is freed.
      adapt: adds adapters to the model.
      save: `save_pretrained` or `save_orbax`; `options` are its further arguments. To check an Orbax folder, both models'
        weights are in memory.

    Raises:
      ArithmeticError: the files are not base + adapter.
    """
    # Imported here: Orbax is slow to import, and nothing else needs it.
    from moe_jax.checkpoint.orbax_params import load_orbax, save_orbax

    model = load()
    adapt(model)
    print(f"the adapter has {lora_summary(model).counts}", file=sys.stderr)
    changes, dtype, vocab_size = changes_of(model), model.embed_tokens.weight.dtype, model.config.vocab_size
    merge_adapter(model)
    save(model, target, **options)
    del model
    base = load()
    extend_vocabulary(base, vocab_size)
    written = _of_model(load_orbax(target, dtype=dtype)) if save is save_orbax else _of_files(target, base)
    error = check_merged(written, _of_model(base), changes)
    print(
        f"compared with base + adapter: {len(changes)} matrices are changed, with a relative error of at most "
        f"{error:.1e}, and all others are the base's"
    )


def _of_model(model: Decoder) -> Iterator[tuple[str, np.ndarray]]:
    return export(model.config, dict(nnx.to_flat_state(nnx.state(model))))


def _of_files(folder: str, base: Decoder) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of a Hugging Face folder in the base's order, and then those that the base does not have."""
    stored = open_tensors(Path(folder).expanduser(), [])
    order = [tensor.name for tensor in hf_tensors(base.config)]
    for name in (*order, *sorted(stored.keys() - set(order))):
        if name in stored:
            yield name, stored[name].read(tuple(slice(0, size) for size in stored[name].shape))


ABSENT = "", np.empty(0)
DO_NOT = "do not use this checkpoint"


def changes_of(model: Decoder) -> dict[str, Change | np.ndarray]:
    """Returns the changes b a of all adapted matrices, on the host, under the checkpoint's names of their weights.

    A weight that is trained whole, and a table whose rows are trained, is returned itself.
    """
    whole = {f"{each.name}.weight": each.on_host for each in whole_modules(model) if each.is_trained}
    for name, table in trained_tables(model).items():
        whole[f"{name}.weight"] = host_array(table.token_rows.put(table.weight.get_value()))
    changes: dict[str, Change | np.ndarray] = {}
    for module, change in changes_in_files(model):
        if module.is_fused:
            # The checkpoint's tensor is transposed.
            changes[parameter_name([module])] = Change(*(factor.swapaxes(1, 2) for factor in reversed(change)))
        else:
            changes[f"{module.name}.weight"] = change
    return changes | whole


def check_merged(
    merged: Iterable[tuple[str, np.ndarray]], base: Iterable[tuple[str, np.ndarray]], changes: dict[str, Change | np.ndarray]
) -> float:
    """Compares each tensor of `merged` with base + b a, up to one rounding to its dtype; returns the largest relative error.

    Args:
      merged, base: (name, array) in the order of `checkpoint.hf_names.export`.
      changes: as from `changes_of`.

    Raises:
      ArithmeticError: a tensor differs, or a change is missing; the message names the first.
    """
    left, largest = dict(changes), 0.0
    for (name, array), (base_name, weight) in zip_longest(merged, base, fillvalue=ABSENT):
        if name != base_name or array.shape != weight.shape:
            raise ArithmeticError(f"{name or base_name}: the merged checkpoint and the base do not have the same tensors")
        change = left.pop(name, None)
        if isinstance(change, np.ndarray) and not np.array_equal(array, change.astype(array.dtype)):
            raise ArithmeticError(f"{name}: the merged checkpoint differs from the trained weight; {DO_NOT}")
        if not isinstance(change, Change):
            if change is None and not np.array_equal(array, weight.astype(array.dtype)):
                raise ArithmeticError(f"{name}: the adapter does not change it, and yet it differs from the base's; {DO_NOT}")
            continue
        largest = max(largest, _error(name, array, weight, change))
    if left:
        raise ArithmeticError(f"{next(iter(left))}: the adapter changes it, and the merged checkpoint lacks it; {DO_NOT}")
    return largest


def _error(name: str, array: np.ndarray, weight: np.ndarray, change: Change) -> float:
    """Returns the relative error of a changed matrix, in the Frobenius norm, after a check of each number."""
    product = change.b @ change.a
    expected = weight.astype(np.float32) + product
    # Half a unit in the last place for rounding to the dtype; the rest is for another order of summation.
    room = np.abs(expected) * float(jnp.finfo(array.dtype).eps) + 1e-5 * np.abs(product).max(initial=0)
    difference = np.abs(array.astype(np.float32) - expected)
    if not (difference <= room).all():
        raise ArithmeticError(
            f"{name}: the merged checkpoint differs from base + adapter by up to {difference.max():.1e}, which no rounding to "
            f"{array.dtype} explains; {DO_NOT}"
        )
    return float(np.linalg.norm(difference) / max(np.linalg.norm(expected), float(np.finfo(np.float32).tiny)))
