"""Adds adapters to a model and freezes its parameters; counts trained parameters, also from a config alone."""

import math
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from moe_jax.adapters.names import OUTSIDE, Target, WholeModule, targets_of, whole_modules
from moe_jax.adapters.settings import DEFAULT_TARGETS, LoraSettings
from moe_jax.adapters.token_rows import check_tokens, train_rows, trained_tables
from moe_jax.config import ModelConfig
from moe_jax.layers.lora import Adapter, Frozen, freeze, has_adapters
from moe_jax.layers.matrices import check_declared
from moe_jax.layers.quantised import matrices_of
from moe_jax.models.auto import from_config
from moe_jax.models.decoder import Decoder
from moe_jax.parallel.layout import mesh_of, parameter_sharding
from moe_jax.parallel.pipeline.chunks import split_layers

WITH_NAMES = ("attention", *OUTSIDE)
"""The kinds whose matrices may be targets by their own names."""
OF_VOCABULARY = {*OUTSIDE, "embed_tokens", "lm_head"}
"""Names of the embedding and the head, which may share one matrix."""
WITH_DROPOUT = ("attention", "mlp")
"""The kinds of matrices whose adapters support dropout."""


def add_lora(model: Decoder, settings: LoraSettings | None = None, *, rngs: nnx.Rngs) -> "LoraSummary":
    """Adds adapters to the model in place, and freezes all of its parameters. The model computes the same as before.

    From then on only the adapters, the weights of `modules_to_save`, and the rows of `trainable_token_indices` are `nnx.Param`:
    `train.init_state`, gradients and optimizers see nothing else. Frozen arrays are `layers.lora.Frozen`. Only the originals of
    `modules_to_save` are copied. Everything trained is f32. `layers.matrices` states how a mesh splits it.

    Returns:
      A summary of the trained parameters, to print.

    Raises:
      ValueError: the model has adapters already, or multi-token prediction modules. Or a matrix is not declared
        (`layers.matrices`), or a name in `targets` or `ranks` is not a target in this model. Or dropout for experts or routers,
        or a name in `modules_to_save` that has an adapter too. Or a token that is not in the vocabulary, nor next after it, or
        whose table is trained otherwise. The model is then unchanged.
    """
    settings = settings or LoraSettings()
    chosen = _chosen(model, settings)
    whole = _chosen_whole(model, settings.modules_to_save, chosen)
    _check_rows(model, settings.trainable_token_indices, chosen, whole)
    active_experts = model.config.experts.num_experts_per_tok if model.config.experts else 1
    mesh = mesh_of(nnx.state(model))
    freeze(model)
    for target in chosen:
        rank = settings.rank_of(target.kind, target.name, active_experts)
        put_adapter(target, _adapter_of(target, rank, settings, rngs), mesh)
    train_whole(whole)
    if settings.trainable_token_indices:
        train_rows(model, dict.fromkeys(model.tables, settings.trainable_token_indices))
    return lora_summary(model)


def put_adapter(target: Target, adapter: Adapter, mesh: Mesh | None) -> None:
    """Attaches the adapter to the target's matrix, with factors laid out on the mesh."""
    if mesh is not None:
        for name, factor in (("a", adapter.a), ("b", adapter.b)):
            path, array = (*target.path, target.adapter, name), factor.get_value()
            if target.pipe.ranks > 1:
                array = split_layers(array, *target.pipe)
            factor.set_value(jax.device_put(array, parameter_sharding(path, array.shape, mesh)))
    setattr(target.module, target.adapter, adapter)


def train_whole(modules: list[WholeModule]) -> None:
    """Makes the frozen weights of these modules trainable, as copies in f32; the model keeps each original."""
    for module in {id(each.module): each.module for each in modules}.values():
        module.original = module.weight
        # A step donates trained arrays, so an original in f32 is copied too.
        module.weight = nnx.Param(jnp.array(module.original.get_value(), jnp.float32))


def check_can_adapt(model: Decoder) -> None:
    """Raises `add_lora`'s errors for a model that cannot have adapters."""
    if has_adapters(model):
        raise ValueError("the model has adapters already: merge them (merge_adapter), or load the model again")
    if model.config.mtp_stages:
        raise ValueError(
            "the model has modules that predict further tokens, which no adapter file can hold; load it without them: "
            "from_pretrained(..., mtp=False)"
        )


def _chosen(model: Decoder, settings: LoraSettings) -> list[Target]:
    """Returns the matrices that get an adapter, after all checks."""
    check_can_adapt(model)
    check_declared(nnx.to_flat_state(nnx.state(model, (nnx.Param, Frozen))))
    targets = list(targets_of(model))
    names = {kind for kind, *_ in targets} | {target.name for target in targets if target.kind in WITH_NAMES}
    if model.config.tie_word_embeddings and (tied := {*(settings.targets or ()), *settings.ranks} & OF_VOCABULARY):
        raise ValueError(
            f"LoraSettings: {', '.join(sorted(tied))} cannot have an adapter: the model's head and embedding share one matrix, "
            "and an adapter's file would change only one of them; leave the name out"
        )
    _check_names("targets", settings.targets or (), names)
    _check_names("ranks", settings.ranks, names)
    wanted = DEFAULT_TARGETS if settings.targets is None else settings.targets
    chosen = [target for target in targets if target.kind in wanted or (target.kind in WITH_NAMES and target.name in wanted)]
    without = dict.fromkeys(target.kind for target in chosen if target.kind not in WITH_DROPOUT)
    if settings.dropout and without:
        fitting = [kind for kind in WITH_DROPOUT if kind in names]
        raise ValueError(
            f"LoraSettings: dropout={settings.dropout} is only for attention and mlp, but targets include "
            f"{' and '.join(without)}, whose adapters read the same rows as the frozen matrix. Give targets={fitting}"
        )
    return chosen


def _chosen_whole(model: Decoder, names: tuple[str, ...], adapted: list[Target]) -> list[WholeModule]:
    """Returns the modules that are trained whole, after all checks."""
    fitting = sorted({module.name.rsplit(".", 1)[-1] for module in whole_modules(model)})
    if unknown := [name for name in names if not whole_modules(model, (name,))]:
        raise ValueError(
            f"LoraSettings: modules_to_save has {', '.join(map(repr, unknown))}, which this model cannot train whole; it can "
            f"train {', '.join(fitting)}"
        )
    whole = whole_modules(model, names) if names else []
    if twice := {target.name for target in adapted for each in whole if target.module is each.module}:
        raise ValueError(f"LoraSettings: {', '.join(sorted(twice))} is in targets and in modules_to_save: choose one")
    return whole


def _check_rows(model: Decoder, tokens: tuple[int, ...], adapted: list[Target], whole: list[WholeModule]) -> None:
    """Checks the tokens whose rows are trained alone."""
    check_tokens(tokens, model.config.vocab_size, "LoraSettings: trainable_token_indices")
    others = [each.module for each in adapted] + [each.module for each in whole]
    if tokens and (twice := [name for name, table in model.tables.items() if any(table is other for other in others)]):
        raise ValueError(f"LoraSettings: {', '.join(twice)} has trainable_token_indices and is trained otherwise: choose one")


def _check_names(setting: str, given: Collection[str], names: Collection[str]) -> None:
    if unknown := [name for name in given if name not in names]:
        raise ValueError(
            f"LoraSettings: {setting} has {', '.join(map(repr, unknown))}, which this model does not have; "
            f"it has {', '.join(sorted(names))}"
        )


def _adapter_of(target: Target, rank: int, settings: LoraSettings, rngs: nnx.Rngs) -> Adapter:
    *leading, num_out, num_in = target.shape
    of_a, of_b = tuple(leading), tuple(leading)
    if target.kind == "experts" and settings.shared_outer:
        # The factors on the hidden states' side: the input of the first matrices, the output of the second.
        of_a, of_b = ((*of_a[:-1], 1), of_b) if target.weight == "gate_up_proj" else (of_a, (*of_b[:-1], 1))
    return Adapter(
        (*of_a, rank, num_in), (*of_b, num_out, rank), scale=settings.scale_of(rank), dropout=settings.dropout, rngs=rngs
    )


class AdaptedKind(NamedTuple):
    """The adapters of the matrices of one kind."""

    parameters: int
    ranks: tuple[int, ...]
    """All ranks, in order; for experts, the rank of one expert; () for modules that are trained whole."""


@dataclass(frozen=True)
class LoraSummary:
    """The trained and the frozen parameters of a model with adapters. `str` returns a one-line report.

    Attributes:
      kinds: the adapters of each kind of matrices, such as "attention"; and modules that are trained whole, by last name.
      without: kinds in the model that have no adapter.
      frozen_parameters: the number of parameters that are not trained.
      active_experts: number of experts per token; None for a dense model.
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
        return f"{self.parameters:,} parameters next to {self.frozen_parameters:,} frozen ones: {', '.join(kinds)}{without}"

    def _ranks(self, name: str) -> str:
        if not self.kinds[name].ranks:
            return "whole"
        ranks = "/".join(map(str, self.kinds[name].ranks))
        return f"rank {ranks} an expert, {self.active_experts} active" if name == "experts" else f"rank {ranks}"


def lora_summary(model: Decoder) -> LoraSummary:
    """Counts the parameters of a model with adapters."""
    parameters: dict[str, int] = defaultdict(int)
    ranks: dict[str, set[int]] = defaultdict(set)
    # Embedding and head have no adapter unless requested, and norms never have one.
    all_kinds = dict.fromkeys(target.kind for target in targets_of(model) if target.kind not in OUTSIDE or target.found)
    for target in targets_of(model):
        if (adapter := target.found) is not None:
            sizes = (jax.eval_shape(target.in_order, factor[...]).size for factor in (adapter.a, adapter.b))
            parameters[target.kind] += sum(sizes)
            ranks[target.kind].add(adapter.rank)
    kinds = {kind: AdaptedKind(parameters[kind], tuple(sorted(ranks[kind]))) for kind in all_kinds if kind in ranks}
    for each in whole_modules(model):
        if each.is_trained:
            name, size = each.name.rsplit(".", 1)[-1], math.prod(each.tensor.shape)
            kinds[name] = AdaptedKind(size + (kinds[name].parameters if name in kinds else 0), ())
    for name, table in trained_tables(model).items():
        rows = table.token_rows.rows
        kinds[f"rows of {name.rsplit('.', 1)[-1]}"] = AdaptedKind(rows.size, ())
    return LoraSummary(
        kinds,
        tuple(kind for kind in all_kinds if kind not in kinds),
        sum(matrix.size for matrix in matrices_of(nnx.state(model, Frozen))),
        model.config.experts.num_experts_per_tok if model.config.experts else None,
    )


class PlannedLora(NamedTuple):
    """The adapters that a model would get."""

    summary: LoraSummary
    moved_elements: int
    """Elements that all adapters read and write in the forward pass of one token: inputs, and sums with outputs."""
    factors: tuple[tuple[tuple, tuple[int, ...]], ...]
    """The path and the shape of each factor, and of each weight that is trained whole."""


def planned_lora(config: ModelConfig, settings: LoraSettings, *, in_fp8: bool = False) -> PlannedLora:
    """Returns what `add_lora` would add to a model of this config. No array is made.

    Args:
      in_fp8: the experts' own products are in FP8. Rounding their rows and adding the products are then separate passes.

    Raises:
      ValueError: as `add_lora`.
    """
    found: list[PlannedLora] = []

    def adapted() -> Decoder:
        model = from_config(config, rngs=nnx.Rngs(0))
        summary = add_lora(model, settings, rngs=nnx.Rngs(0))
        factors = tuple((path, factor.shape) for path, factor in nnx.to_flat_state(nnx.state(model, nnx.Param)))
        found.append(PlannedLora(summary, _moved_elements(model, in_fp8), factors))
        return model

    nnx.eval_shape(adapted)
    return found[0]


def _moved_elements(model: Decoder, in_fp8: bool) -> int:
    active, moved = model.config.experts.num_experts_per_tok if model.config.experts else 1, 0
    for target in targets_of(model):
        if target.found is not None:
            layers, *_, num_out, num_in = target.shape
            of_row = num_in + 2 * num_out
            if target.kind == "experts":
                # Rounding reads 2 bytes and writes 1; adding reads a product and writes its sum with the change.
                of_row = active * (of_row + (3 * num_in // 2 + 2 * num_out if in_fp8 else 0))
            moved += layers * of_row
    return moved
