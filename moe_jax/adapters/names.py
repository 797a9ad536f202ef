"""The modules of a checkpoint that an adapter file names, and the places of their factors in the model.

PEFT's names: `base_model.model.` MODULE `.lora_A.weight` [rank, in] and `.lora_B.weight` [out, rank]. Each expert's three
projections stand apart, as on the hub. The model has one a for an expert's gate and up projections, and their b's as halves.
The embedding has `.lora_embedding_A` [rank, vocab] and `.lora_embedding_B` [hidden, rank], factors of the transposed table.
"""

from typing import NamedTuple

from moe_jax.adapters.targets import Target, targets_of
from moe_jax.checkpoint.hf_names import hf_tensors
from moe_jax.models.decoder import Decoder

PREFIX = "base_model.model."


class ModulePart(NamedTuple):
    """A module of a checkpoint, and the part of a target's stacked matrices that it is."""

    name: str
    """For example "model.layers.3.mlp.experts.17.gate_proj"."""
    target: Target
    layer: int
    """The layer's place in its stage."""
    expert: int | None
    rows: slice
    """The rows of the matrix: a half of it for gate and up projections."""

    @property
    def leaf(self) -> str:
        """The last name, as PEFT's `target_modules` lists it."""
        return self.name.rsplit(".", 1)[-1]


def modules_of(model: Decoder) -> list[ModulePart]:
    """Returns every module that an adapter of this model can change, in the order of a checkpoint."""
    targets = {(*target.path, target.weight): target for target in targets_of(model)}
    modules = []
    for tensor in hf_tensors(model.config):
        if (target := targets.get(tensor.path)) is not None and tensor.name.endswith(".weight"):
            # Embedding and head are no part of a stack.
            layer, expert, rows = (*(tensor.index or (0,)), None, None)[:3]
            assert isinstance(layer, int) and not isinstance(expert, slice)
            whole = rows if isinstance(rows, slice) else slice(None)
            modules.append(ModulePart(tensor.name.removesuffix(".weight"), target, layer, expert, whole))
    return modules
