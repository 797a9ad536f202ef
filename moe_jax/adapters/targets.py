"""The matrices of a model that an adapter can change, and where the model holds each adapter."""

from collections.abc import Iterator
from typing import NamedTuple

from flax import nnx

from moe_jax.layers.lora import Adapter
from moe_jax.layers.matrices import declared
from moe_jax.models.decoder import Decoder


class Target(NamedTuple):
    """A matrix, or one of each expert, stacked over the layers of a stage."""

    kind: str
    """One of KINDS or OUTSIDE: the matrix's role (`layers.matrices`); shared experts are of "mlp"."""
    path: tuple
    """The path of the module that holds the matrix."""
    module: nnx.Module
    weight: str
    """The name of the matrix in the module."""
    adapter: str
    """The name of its adapter in the module."""

    @property
    def name(self) -> str:
        """The matrix's name in its layer: "q_proj", or "gate_up_proj" for both first matrices of experts."""
        return self.weight if self.kind == "experts" else str(self.path[-1])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the stacked matrices: [layers, (experts,) out, in]; of embedding and head [1, vocab, hidden]."""
        shape = getattr(self.module, self.weight).shape
        return (1, *shape) if self.kind in OUTSIDE else shape

    @property
    def found(self) -> Adapter | None:
        """The adapter; None without one."""
        return getattr(self.module, self.adapter)


KINDS = ("attention", "mlp", "experts", "router")
"""The kinds inside the layers."""
OUTSIDE = ("embedding", "head")
"""The kinds outside the layers; their matrices are not stacked."""
ADAPTERS = {"weight": "lora", "gate_up_proj": "gate_up_lora", "down_proj": "down_lora"}
"""The names of adapters in a module by those of their matrices."""


def targets_of(model: Decoder) -> Iterator[Target]:
    """Yields every matrix that can have an adapter: those inside the layers, and embedding and head if they are not tied."""
    kinds = KINDS if model.config.tie_word_embeddings else (*OUTSIDE, *KINDS)
    for path, module in nnx.iter_modules(model):
        for weight, adapter in ADAPTERS.items():
            if hasattr(module, weight) and hasattr(module, adapter) and (matrix := declared((*path, weight))) is not None:
                kind = "mlp" if matrix.role == "shared_experts" else matrix.role
                if kind in kinds:
                    yield Target(kind, path, module, weight, adapter)
