"""Loads models for generation and serving: checks them before weights are read; merges an adapter or keeps it separate."""

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moe_jax.commands.options import Dtype, InferencePrecision
from moe_jax.models.precision import Weights

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from moe_jax.models.decoder import Decoder

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadingOptions:
    """Options for loading a model: dtype, precision, form of the weights, and an optional adapter.

    Args:
      adapter: a folder or hub id of an adapter (LoRA) for the model's weights.
      dtype: the dtype that the model computes in.
      precision: fp8 multiplies the experts in 8 bits, with FP8 weights of the files as they are, or rounded (docs/fp8.md).
        Default: in the dtype.
      weights: the form of the weights: whole, "as stored" for files in FP8 or 4 bits, or experts in nf4 or fp8. These are
        made whole in each step, which takes time, except with --precision fp8. An adapter is merged into whole weights, and
        computed separately with other forms (docs/adapters.md). Default: whole; with an adapter as stored.
    """

    adapter: str | None = None
    dtype: Dtype = "bfloat16"
    precision: InferencePrecision = "bf16"
    weights: Weights | None = None


def checked_loading(
    folder: Path, adapter: str | None, wanted: LoadingOptions, *, mtp: bool, mesh: "Mesh | None" = None
) -> tuple[Weights, Callable[[], "Decoder"]]:
    """Chooses the form of the weights and validates model, adapter and options, before any weights are read.

    Reads configs, headers of files, and the adapter. Returns the form, and a function that reads the weights and the adapter
    and prints what was adapted. An adapter is merged into whole weights, and kept separate from other forms.

    Args:
      folder: the weights' folder.
      wanted: with weights None, the form is FP8 if `precision` is "fp8". Else "as stored" for an adapter on quantised files on
        one device. Else whole.
      mtp: True loads the MTP modules, for drafts.

    Raises:
      FileNotFoundError, ValueError: as `from_pretrained` and `adapters.load_adapter`. Also an adapter with drafts.
    """
    from moe_jax.adapters.load import check_adapter
    from moe_jax.checkpoint.hf_load import check_form, from_pretrained, is_stored_quantised, read_config
    from moe_jax.models.decoder import fp8_refusal

    config, precision, weights, dtype = read_config(folder, mtp=mtp), wanted.precision, wanted.weights, wanted.dtype
    if precision != "bf16":
        if (reason := fp8_refusal(config, dtype)) is not None:
            raise ValueError(f"--precision {precision}: {reason}; use 'bf16'")
        if weights not in (None, "fp8"):
            raise ValueError(f"--precision {precision} multiplies weights in FP8: leave --weights {weights!r} out")
    stays_quantised = adapter is not None and mesh is None and is_stored_quantised(folder)
    form = weights or ("fp8" if precision != "bf16" else "as stored" if stays_quantised else "whole")
    check_form(folder, form)
    if adapter is not None:
        if mtp:
            raise ValueError(
                "--drafts module is for a model without an adapter, whose file has no such module; lookup:3 needs none"
            )
        check_adapter(config, adapter)
        if form != "whole":
            _logger.info("the adapter is not merged into weights %s: each step adds its part", _FORMS[form])

    def load() -> "Decoder":
        model = from_pretrained(folder, weights=form, dtype=dtype, mtp=mtp, mesh=mesh)
        model.set_precision(precision)
        return with_adapter(model, adapter, merge=form == "whole")

    return form, load


def with_adapter(model: "Decoder", adapter: str | None, *, merge: bool = True) -> "Decoder":
    """Loads an adapter onto the model, merged into its weights or kept separate, and prints a summary.

    Raises:
      FileNotFoundError, ValueError: as `adapters.load_adapter`.
    """
    if adapter is not None:
        from moe_jax.adapters import load_adapter, merge_adapter

        print(f"the adapter has {load_adapter(model, adapter).counts}", file=sys.stderr)
        if merge:
            merge_adapter(model)
    return model


_FORMS = {"as stored": "as they are stored", "nf4": "in NF4", "fp8": "in FP8"}
