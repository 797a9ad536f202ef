"""Models of commands that answer: what cannot run is refused before weights are read; an adapter is merged or kept."""

import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_jax.checkpoint.weights import Weights
from moe_jax.commands.options import InferencePrecision

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from moe_jax.models.decoder import Decoder

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loading:
    """A model that can be loaded: `checked_loading` found nothing in the way.

    Attributes:
      folder: of the weights.
      adapter: a folder or hub id.
      form: of the weights. An adapter is merged into whole weights, and kept separate from others.
      options: further arguments of `from_pretrained`.
    """

    folder: Path
    adapter: str | None
    precision: InferencePrecision
    form: Weights
    options: dict[str, Any]

    def load(self) -> "Decoder":
        """Reads the weights and the adapter, and prints what was adapted.

        Raises:
          FileNotFoundError, ValueError: as `from_pretrained` and `adapters.load_adapter`.
        """
        from moe_jax.checkpoint.hf_load import from_pretrained

        model = from_pretrained(self.folder, weights=self.form, **self.options)
        model.set_precision(self.precision)
        return with_adapter(model, self.adapter, merge=self.form == "whole")


def checked_loading(
    folder: Path,
    adapter: str | None,
    *,
    precision: InferencePrecision,
    weights: Weights | None,
    dtype: str,
    mtp: bool,
    mesh: "Mesh | None" = None,
) -> Loading:
    """Chooses the form of the weights, and checks that the model, the adapter and the options fit together.

    Reads configs, headers of files, and the adapter.

    Args:
      folder: of the weights.
      weights: their form. None: FP8 for `precision` "fp8". Else, with an adapter beside quantised files on one device, as
        stored. Else whole.
      mtp: True loads the modules that predict further tokens, for drafts.

    Raises:
      FileNotFoundError, ValueError: as `from_pretrained` and `adapters.load_adapter`. Also an adapter with drafts.
    """
    from moe_jax.adapters.load import check_adapter
    from moe_jax.checkpoint.hf_load import check_form, is_stored_quantised, read_config
    from moe_jax.models.decoder import fp8_refusal

    config = read_config(folder, mtp=mtp)
    if precision != "bf16":
        if (reason := fp8_refusal(config, dtype)) is not None:
            raise ValueError(f"--precision {precision}: {reason}; take 'bf16'")
        if weights not in (None, "fp8"):
            raise ValueError(f"--precision {precision} multiplies weights in FP8: leave --weights {weights!r} out")
    form = weights or _default_form(precision, adapter is not None and mesh is None and is_stored_quantised(folder))
    check_form(folder, form)
    if adapter is not None:
        if mtp:
            raise ValueError("--drafts is for a model without an adapter, whose file cannot hold the module that drafts")
        check_adapter(config, adapter)
        if form != "whole":
            _logger.info("the adapter is not merged into weights %s: each step adds its part", _FORMS[form])
    return Loading(folder, adapter, precision, form, dict(dtype=dtype, mtp=mtp, mesh=mesh))


def with_adapter(model: "Decoder", adapter: str | None, *, merge: bool = True) -> "Decoder":
    """Returns the model with the adapter of a folder or hub id, merged into its weights or not; prints what was adapted.

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


def _default_form(precision: InferencePrecision, stays_quantised: bool) -> Weights:
    if precision != "bf16":
        return "fp8"
    return "as stored" if stays_quantised else "whole"
