"""The matrices that an adapter can change: where the model holds each adapter, and how files name its factors.

PEFT's names: `base_model.model.` MODULE `.lora_A.weight` [rank, in] and `.lora_B.weight` [out, rank]. Each expert's three
projections are separate, as on the hub. In the model, an expert's gate and up projections share one a, and each has half of one
b. The embedding has `.lora_embedding_A` [rank, vocab] and `.lora_embedding_B` [hidden, rank], factors of the transposed table.

Other programs write the factors of all experts of a layer as one tensor, which is split by expert. There are E experts of
rank r. W[e] [out, in] is gate_up [2*inter, hidden] or down [hidden, inter]. Names follow `mlp.experts`:

| written by | names | lora_A | lora_B |
|---|---|---|---|
| PEFT 0.19 and later | `.base_layer` (gate_up), none (down) | [E*r, in], experts slowest | [out, r*E], experts fastest |
| PEFT 0.18: the change's transpose | the same | [E*r, out], experts slowest | [in, r*E], experts fastest |
| Unsloth before September 2026 | the same | [E*r, in], experts slowest | [out, E*r], experts slowest |
| Tinker, SGLang (shared outer) | `.w1`, `.w3`, `.w2` (gate, up, down) | [E or 1, r, in] | [E or 1, out, r] |
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.checkpoint.hf_names import HfTensor, Index, hf_tensors, host_array, layer_on_host
from moe_jax.layers.lora import Adapter
from moe_jax.layers.matrices import declared
from moe_jax.models.decoder import Decoder
from moe_jax.parallel.layout import lies_in_chunks
from moe_jax.parallel.pipeline.chunks import PipeShape, join_layers


class Target(NamedTuple):
    """A matrix (or one per expert), stacked over the layers of a stage."""

    kind: str
    """One of KINDS or OUTSIDE: the matrix's role (`layers.matrices`); shared experts are of "mlp"."""
    path: tuple
    """The path of the module that holds the matrix."""
    module: nnx.Module
    weight: str
    """The name of the matrix in the module."""
    adapter: str
    """The name of its adapter in the module."""
    layers: int
    """The number of matrices in the stack; 1 outside the layers."""

    @property
    def name(self) -> str:
        """The matrix's name in its layer: "q_proj", or "gate_up_proj" for both first matrices of experts."""
        return self.weight if self.kind == "experts" else str(self.path[-1])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the stacked matrices: [layers, (experts,) out, in]; of embedding and head [1, vocab, hidden]."""
        shape = getattr(self.module, self.weight).shape
        return (self.layers, *shape[3 if self.pipe.ranks > 1 else 0 if self.kind in OUTSIDE else 1 :])

    @property
    def pipe(self) -> PipeShape:
        """The ranks and chunks of a pipeline that the matrices are stacked for."""
        shape = getattr(self.module, self.weight).shape
        return PipeShape(shape[1], shape[0]) if lies_in_chunks((*self.path, self.weight), shape) else PipeShape()

    def in_order(self, factor: Array) -> Array:
        """Returns a factor of the adapter with one axis of layers, from a pipeline's chunks."""
        return join_layers(factor, self.layers) if self.pipe.ranks > 1 else factor

    @property
    def found(self) -> Adapter | None:
        """The adapter; None without one."""
        return getattr(self.module, self.adapter)


KINDS = ("attention", "mlp", "experts", "router")
"""The kinds inside the layers."""
OUTSIDE = ("embedding", "head")
"""The kinds outside the layers; their matrices are not stacked."""
ADAPTERS = {"weight": "lora", "gate_up_proj": "gate_up_lora", "down_proj": "down_lora"}
"""{name of a matrix in its module: name of its adapter}."""


def targets_of(model: Decoder) -> Iterator[Target]:
    """Yields every matrix that can have an adapter: those inside the layers, and embedding and head if they are not tied."""
    kinds = KINDS if model.config.tie_word_embeddings else (*OUTSIDE, *KINDS)
    for path, module in nnx.iter_modules(model):
        for weight, adapter in ADAPTERS.items():
            if hasattr(module, weight) and hasattr(module, adapter) and (matrix := declared((*path, weight))) is not None:
                kind = "mlp" if matrix.role == "shared_experts" else matrix.role
                if kind in kinds:
                    layers = model.config.all_stages[int(str(path[1]))].repeats if path[0] == "stages" else 1
                    yield Target(kind, path, module, weight, adapter, layers)


PREFIX = "base_model.model."


class Change(NamedTuple):
    """The factors of a module's change b a, on the host in f32."""

    a: np.ndarray
    b: np.ndarray


class ModulePart(NamedTuple):
    """A module of a checkpoint, and its part of a target's stacked matrices."""

    name: str
    """For example "model.layers.3.mlp.experts.17.gate_proj"."""
    target: Target
    layer: int
    """The layer's index in its stage."""
    expert: int | None
    rows: slice
    """The rows of the matrix: a half of it for gate and up projections."""
    rows_in_file: slice | None = None
    """The rows of a fused tensor's matrix, if files have the experts' factors only fused: every second one for gate and up."""

    @property
    def is_fused(self) -> bool:
        """True if files have the factors of all experts as one tensor."""
        return self.rows_in_file is not None

    @property
    def leaf(self) -> str:
        """The last name, as PEFT's `target_modules` lists it."""
        return self.name.rsplit(".", 1)[-1]

    @property
    def projection(self) -> str:
        """The matrix of an expert: "gate_proj", "up_proj" or "down_proj", however the checkpoint names it."""
        return "down_proj" if self.target.weight == "down_proj" else "up_proj" if self.rows.start else "gate_proj"


def modules_of(model: Decoder) -> list[ModulePart]:
    """Returns every module that an adapter of this model can change, in the order of a checkpoint."""
    targets = {(*target.path, target.weight): target for target in targets_of(model)}
    modules: list[ModulePart] = []
    for tensor in hf_tensors(model.config):
        target = targets.get(tensor.path)
        if target is not None and tensor.transposed:
            modules += _of_fused(tensor, target)
        elif target is not None and tensor.name.endswith(".weight"):
            # Embedding and head are not stacked.
            layer, expert, rows = (*(tensor.index or (0,)), None, None)[:3]
            assert isinstance(layer, int) and not isinstance(expert, slice)
            all_rows = rows if isinstance(rows, slice) else slice(None)
            modules.append(ModulePart(tensor.name.removesuffix(".weight"), target, layer, expert, all_rows))
    return modules


def _of_fused(tensor: HfTensor, target: Target) -> Iterator[ModulePart]:
    """Yields the modules that a tensor of all experts holds, under the names that other checkpoints give them."""
    (layer, *_), (experts, _, num_out), prefix = tensor.index, tensor.shape, tensor.name.rsplit(".", 1)[0]
    assert isinstance(layer, int)
    parts = {"down_proj": (slice(None), slice(None))}
    if tensor.in_turn:
        halves = slice(0, num_out // 2), slice(num_out // 2, num_out)
        parts = {"gate_proj": (halves[0], slice(0, None, 2)), "up_proj": (halves[1], slice(1, None, 2))}
    for expert in range(experts):
        for name, rows in parts.items():
            yield ModulePart(f"{prefix}.{expert}.{name}", target, layer, expert, *rows)


def host_changes(model: Decoder, scale: float = 1.0) -> Iterator[tuple[ModulePart, Change]]:
    """Yields each module that has an adapter, with factors on the host: scale * b a is its change."""
    on_host: dict[tuple, Change] = {}
    for module in modules_of(model):
        if (adapter := module.target.found) is not None:
            key = *module.target.path, module.target.adapter
            if key not in on_host:
                a, b = (host_array(module.target.in_order(factor[...])) for factor in (adapter.a, adapter.b))
                factors = a, b * np.float32(adapter.scale / scale)
                on_host[key] = Change(*factors)
            a, b = (factor[module.layer] for factor in on_host[key])
            if module.expert is not None:
                # A factor that all experts share has an expert axis of 1.
                a, b = (factor[min(module.expert, len(factor) - 1)] for factor in (a, b))
            yield module, Change(a, b[module.rows])


def changes_in_files(model: Decoder, scale: float = 1.0) -> Iterator[tuple[ModulePart, Change]]:
    """Yields `host_changes`, but the modules of a fused tensor as one, the first, with the factors of all experts.

    These are a [experts, rank, in] and b [experts, out, rank], with b's rows in the file's order.
    """
    for _, of_matrix in itertools.groupby(host_changes(model, scale), lambda each: (each[0].target, each[0].layer)):
        parts = list(of_matrix)
        first, (a, _) = parts[0]
        if not first.is_fused:
            yield from parts
            continue
        *_, experts, num_out, num_in = first.target.shape
        whole = Change(np.zeros((experts, len(a), num_in), np.float32), np.zeros((experts, num_out, len(a)), np.float32))
        for part, change in parts:
            whole.a[part.expert], whole.b[part.expert, part.rows_in_file] = change
        yield first, whole


class WholeModule(NamedTuple):
    """A module of a checkpoint whose weight can be trained as a whole: a norm, a router, the embedding or the head."""

    tensor: HfTensor
    module: Any
    """Holds the `weight`, stacked over layers. If it is trained, also its initial value `original`."""

    @property
    def name(self) -> str:
        """The name on the hub, for example "model.layers.3.mlp.gate"."""
        return self.tensor.name.removesuffix(".weight")

    @property
    def layer(self) -> Index:
        """The index of this module's weight in the stack; () outside the layers."""
        return self.tensor.index[:1]

    @property
    def on_host(self) -> np.ndarray:
        """This module's weight."""
        return layer_on_host(self.tensor.path, self.module.weight, self.layer)

    @property
    def is_trained(self) -> bool:
        """True if the weight is trained in addition to adapters."""
        return hasattr(self.module, "original")


def whole_modules(model: Decoder, names: Sequence[str] = ("",)) -> list[WholeModule]:
    """Returns the modules that can be trained whole and whose names end in one of `names`, as PEFT finds modules_to_save."""
    modules, found = dict(nnx.iter_modules(model)), []
    roles = {"router"} if model.config.tie_word_embeddings else {"router", *OUTSIDE}
    for tensor in hf_tensors(model.config):
        matrix, name = declared(tensor.path), tensor.name.removesuffix(".weight")
        fits = matrix is not None and (matrix.role in roles or str(tensor.path[-2]).endswith("norm"))
        if fits and tensor.path[-1] == "weight" and not tensor.copy and name.endswith(tuple(names)):
            found.append(WholeModule(tensor, modules[tensor.path[:-1]]))
    return found


LEAVES = {".base_layer": ("gate_proj", "up_proj"), "": ("down_proj",)} | {
    f".{name}": (leaf,) for name, leaf in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj"))
}
"""The projections that a fused module holds, by the end of its name after `mlp.experts`."""


def fused_parts(name: str, modules: list[ModulePart]) -> list[ModulePart]:
    """Returns the modules whose factors a fused module of this name holds; none for other names."""
    return [
        module
        for module in modules
        if module.expert is not None
        and any(name == module.name.rsplit(".", 2)[0] + end and module.projection in leaves for end, leaves in LEAVES.items())
    ]


def parameter_name(parts: list[ModulePart]) -> str:
    """Returns the name of the parameter that a fused module changes, which patterns of ranks and alphas match."""
    return f"{parts[0].name.rsplit('.', 2)[0]}.{parts[0].target.weight}"


def factors_apart(
    a: Float[np.ndarray, "..."],
    b: Float[np.ndarray, "..."],
    parts: list[ModulePart],
    peft_version: str | None,
    b_grouped_by_expert: bool,
) -> dict[str, tuple[Float[np.ndarray, "rank in"], Float[np.ndarray, "out rank"]]]:
    """Returns each module's factors from fused tensors.

    Args:
      peft_version: the field of adapter_config.json, if it is there.
      b_grouped_by_expert: the file is Unsloth's, from before September 2026.

    Raises:
      ValueError: the shapes match no layout, or two layouts that the file does not distinguish.
    """
    num_experts = 1 + max(part.expert for part in parts if part.expert is not None)
    *_, num_out, num_in = parts[0].target.shape
    if a.ndim == b.ndim == 3:
        return _shared_outer(a, b, parts, num_experts, num_in)
    if a.ndim != 2 or b.ndim != 2 or len(a) % num_experts or not len(a):
        raise ValueError(_no_layout(a, b, num_experts, num_out, num_in))
    rank = len(a) // num_experts
    now, before = (((len(a), n), (m, len(a))) for n, m in ((num_in, num_out), (num_out, num_in)))
    if (a.shape, b.shape) not in (now, before):
        raise ValueError(_no_layout(a, b, num_experts, num_out, num_in))
    of_a = a.reshape(num_experts, rank, -1)
    if b_grouped_by_expert:
        of_b = b.reshape(-1, num_experts, rank).transpose(1, 0, 2)
    else:
        of_b = b.reshape(-1, rank, num_experts).transpose(2, 0, 1)
    if parts[0].is_fused:
        if (a.shape, b.shape) != now:
            raise ValueError(_no_layout(a, b, num_experts, num_out, num_in))
        return {part.name: (of_a[part.expert], of_b[part.expert, part.rows_in_file]) for part in parts}
    if _is_transposed((a.shape, b.shape) == before, now == before, peft_version):
        of_a, of_b = of_b.transpose(0, 2, 1), of_a.transpose(0, 2, 1)
    return {part.name: (of_a[part.expert], of_b[part.expert, part.rows]) for part in parts}


def _is_transposed(has_old_shapes: bool, is_square: bool, peft_version: str | None) -> bool:
    """Returns True for PEFT 0.18, whose factors belong to the transposed change."""
    if not is_square:
        return has_old_shapes
    if peft_version is None:
        raise ValueError(
            "has factors of a square matrix, which PEFT 0.18 wrote transposed: adapter_config.json must have peft_version"
        )
    return tuple(int(part) for part in peft_version.split(".")[:2]) < (0, 19)


def _shared_outer(a, b, parts: list[ModulePart], num_experts: int, num_in: int) -> dict:
    *_, num_out, _ = parts[0].target.shape
    rows, rank = len(range(num_out)[parts[0].rows]), a.shape[1]
    if {len(a), len(b)} - {1, num_experts} or a.shape[1:] != (rank, num_in) or b.shape[1:] != (rows, rank):
        raise ValueError(
            f"has factors {a.shape} and {b.shape}; shared outer experts have (1 or {num_experts}, r, {num_in}) and "
            f"(1 or {num_experts}, {rows}, r)"
        )
    every_a, every_b = (np.broadcast_to(factor, (num_experts, *factor.shape[1:])) for factor in (a, b))
    return {part.name: (every_a[part.expert], every_b[part.expert]) for part in parts}


def _no_layout(a, b, num_experts: int, num_out: int, num_in: int) -> str:
    return (
        f"has factors {a.shape} and {b.shape}; fused experts have ({num_experts}*r, {num_in}) and "
        f"({num_out}, r*{num_experts}), or in PEFT 0.18 ({num_experts}*r, {num_out}) and ({num_in}, r*{num_experts})"
    )
