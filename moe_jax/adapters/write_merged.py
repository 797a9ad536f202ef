"""Writes a model with adapters merged into its weights, and compares the files with weights and adapters."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from moe_jax.adapters.check_merged import changes_of, check_merged
from moe_jax.adapters.merge import merge_adapter
from moe_jax.adapters.summary import lora_summary
from moe_jax.checkpoint.hf_files import open_tensors
from moe_jax.checkpoint.hf_names import export, hf_tensors
from moe_jax.checkpoint.orbax_params import load_orbax, save_orbax
from moe_jax.models.decoder import Decoder


def write_merged(
    load: Callable[[], Decoder], adapt: Callable[[Decoder], Any], save: Callable[..., None], target: str, **options: Any
) -> None:
    """Writes the merged model, and prints what was adapted and how well the files agree with base + adapter.

    Args:
      load: returns the model without adapters. It is called again for the comparison, when the first one is gone.
      adapt: puts adapters beside the model's weights.
      save: `save_pretrained` or `save_orbax`; `options` are its further arguments. Of an Orbax folder the comparison holds all
        weights, beside those of the base.

    Raises:
      ArithmeticError: the files are not base + adapter.
    """
    model = load()
    adapt(model)
    print(f"the adapter has {lora_summary(model).counts}", file=sys.stderr)
    changes, dtype = changes_of(model), model.embed_tokens.weight.dtype
    merge_adapter(model)
    save(model, target, **options)
    del model
    base = load()
    written = _of_model(load_orbax(target, dtype=dtype)) if save is save_orbax else _of_files(target, base)
    found = check_merged(written, _of_model(base), changes)
    print(
        f"compared with base + adapter: {found.changed} matrices are changed, with a relative error of at most "
        f"{found.largest_error:.1e}, and all others are the base's"
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
