"""Counts the parameters of a model that are trained: a target that was forgotten shows here."""

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from flax import nnx

from moe_jax.adapters.targets import OUTSIDE, targets_of
from moe_jax.layers.lora import Frozen
from moe_jax.layers.quantised import matrices_of
from moe_jax.models.decoder import Decoder


class AdaptedKind(NamedTuple):
    """The adapters of the matrices of one kind."""

    parameters: int
    ranks: tuple[int, ...]
    """All ranks, in order; of experts, that of each expert."""


@dataclass(frozen=True)
class LoraSummary:
    """The trained and the frozen parameters of a model with adapters. `str` is a report of one line.

    Attributes:
      kinds: the adapters of each kind of matrices, such as "attention".
      without: kinds that the model has and that get no adapter.
      frozen_parameters: the number of parameters that are not trained.
      active_experts: the experts that a token sees; None for a dense model.
    """

    kinds: dict[str, AdaptedKind]
    without: tuple[str, ...]
    frozen_parameters: int
    active_experts: int | None

    @property
    def parameters(self) -> int:
        """The number of trained parameters."""
        return sum(kind.parameters for kind in self.kinds.values())

    def __str__(self) -> str:
        return f"LoRA trains {self.counts}"

    @property
    def counts(self) -> str:
        """The report without its verb, for an adapter that is only used."""
        kinds = [f"{name} {kind.parameters:,} ({self._ranks(name)})" for name, kind in self.kinds.items()]
        without = f"; without an adapter: {', '.join(self.without)}" if self.without else ""
        return f"{self.parameters:,} parameters beside {self.frozen_parameters:,}: {', '.join(kinds)}{without}"

    def _ranks(self, name: str) -> str:
        ranks = "/".join(map(str, self.kinds[name].ranks))
        return f"rank {ranks} an expert, {self.active_experts} active" if name == "experts" else f"rank {ranks}"


def lora_summary(model: Decoder) -> LoraSummary:
    """Counts the parameters of a model with adapters."""
    parameters: dict[str, int] = defaultdict(int)
    ranks: dict[str, set[int]] = defaultdict(set)
    # Embedding and head have no adapter unless one is asked for, as norms have none.
    all_kinds = dict.fromkeys(target.kind for target in targets_of(model) if target.kind not in OUTSIDE or target.found)
    for target in targets_of(model):
        if (adapter := target.found) is not None:
            parameters[target.kind] += adapter.a.size + adapter.b.size
            ranks[target.kind].add(adapter.rank)
    kinds = {kind: AdaptedKind(parameters[kind], tuple(sorted(ranks[kind]))) for kind in all_kinds if kind in ranks}
    return LoraSummary(
        kinds,
        tuple(kind for kind in all_kinds if kind not in kinds),
        sum(matrix.size for matrix in matrices_of(nnx.state(model, Frozen))),
        model.config.experts.num_experts_per_tok if model.config.experts else None,
    )
