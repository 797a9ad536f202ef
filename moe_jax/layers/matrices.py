"""Declares every matrix of a model in one table: its role, and the mesh axes that may split it.

The layout (`parallel.layout`), adapters, FP8 and the cost model read the table. A missing matrix is an error there. Otherwise
it would silently be replicated, without an adapter and in bf16.
"""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

Role = Literal["attention", "mlp", "shared_experts", "experts", "router", "embedding", "head", "predictor", "small"]
"""The part of a model that a matrix belongs to. A "predictor" joins the inputs of a multi-token prediction module. A "small"
matrix has no adapter and does not multiply in FP8."""


SPLIT = ("fsdp", "expert", "context")
"""The mesh axes that split a matrix."""


class Declaration(NamedTuple):
    """The role of a parameter (such as "experts") and the mesh axes that split it."""

    role: Role
    axes: int = 2
    """Its own axes, without axes of layers; 1 for a vector. Matrices with an axis of experts have 3."""
    split: tuple[str, ...] = SPLIT
    """The mesh axes that split it, in order; () replicates it."""


_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_EXPERTS = Declaration("experts", 3, ("expert", "fsdp", "context"))  # first along `expert`, where they stay
_VECTOR = Declaration("small", 1, ())

MATRICES: dict[str, Declaration] = {
    "embed_tokens": Declaration("embedding"),
    "lm_head": Declaration("head"),
    "eh_proj": Declaration("predictor"),
    "router": Declaration("router", split=()),
    "experts.gate_up_proj": _EXPERTS,
    "experts.down_proj": _EXPERTS,
    "sinks": _VECTOR,
    "shared_expert_gate": Declaration("small", split=()),
    **dict.fromkeys(_ATTENTION, Declaration("attention")),
    **dict.fromkeys(_MLP, Declaration("mlp")),
    **{f"shared_experts.{name}": Declaration("shared_experts") for name in _MLP},
    **{f"lora.{name}": Declaration("small", 2, ()) for name in "ab"},
    "token_rows.rows": Declaration("small", split=()),
    **{f"{of}_lora.{name}": Declaration("small", 3, _EXPERTS.split) for of in ("gate_up", "down") for name in "ab"},
}
"""Declarations by the last one or two names of a parameter's path, without "weight". Add the matrices of your own modules.
Norms, biases and all other parameters with one axis besides layers are vectors."""


def declared(path: tuple) -> Declaration | None:
    """Returns the `Declaration` of the parameter (or module) at a path; None if `MATRICES` has none.

    A weight that is trained along with adapters has a frozen `original` of the same layout.
    """
    names = [str(name) for name in path if name not in ("weight", "original")]
    found = MATRICES.get(".".join(names[-2:])) or MATRICES.get(".".join(names[-1:]))
    return found or (_VECTOR if names and names[-1].endswith(("norm", "bias")) else None)


def declaration_of(path: tuple, shape: tuple[int, ...]) -> Declaration:
    """Returns the `Declaration` (role and sharding) of the parameter at `path`, as in `nnx.to_flat_state`.

    Raises:
      ValueError: a matrix that is not declared.
    """
    check_declared([(path, shape)])
    return declared(path) or _VECTOR


def is_orthogonalised(path: tuple, shape: tuple[int, ...]) -> bool:
    """Returns True if Muon orthogonalises the parameter's matrices; AdamW updates all others (`train.optimizer`).

    These are the matrices of layers, except routers, and the factors of their adapters.
    """
    matrix, adapted = declaration_of(path, shape), declared(path[:-2])
    roles = {matrix.role, adapted.role if adapted else "small"}
    return matrix.axes > 1 and not roles & {"embedding", "head", "router"}


def check_declared(parameters: Iterable[tuple[tuple, Any]]) -> None:
    """Checks that every matrix of a model is listed in `MATRICES`.

    Args:
      parameters: paths with shapes, or with arrays.

    Raises:
      ValueError: as above; one error names all of them.
    """
    unknown = {path: getattr(leaf, "shape", leaf) for path, leaf in parameters if declared(path) is None}
    matrices = [f"{'.'.join(map(str, p))} {list(s)}" for p, s in unknown.items() if len(s) - (p[0] == "stages") > 1]
    if matrices:
        raise ValueError(
            f"no declaration tells how to split, adapt and round {', '.join(matrices)}: add the name and its role to MATRICES "
            "of moe_jax.layers.matrices, as Declaration('attention'), or Declaration('small', split=()) to keep it whole"
        )
