"""Gives a model adapters and freezes its parameters."""

from collections.abc import Collection

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moe_jax.adapters.settings import DEFAULT_TARGETS, LoraSettings
from moe_jax.adapters.summary import LoraSummary, lora_summary
from moe_jax.adapters.targets import OUTSIDE, Target, targets_of
from moe_jax.layers.lora import Adapter, Frozen, freeze, has_adapters
from moe_jax.models.decoder import Decoder
from moe_jax.parallel.layout import mesh_of
from moe_jax.parallel.matrices import check_declared
from moe_jax.parallel.pipeline.chunks import refuse_chunks

WITH_NAMES = ("attention", *OUTSIDE)
"""The kinds whose matrices may be targets by their own names."""
OF_VOCABULARY = {*OUTSIDE, "embed_tokens", "lm_head"}
"""Names of the matrices that may be one."""
WITH_DROPOUT = ("attention", "mlp")
"""The kinds of matrices whose adapters may leave out parts of their input."""


def add_lora(model: Decoder, settings: LoraSettings | None = None, *, rngs: nnx.Rngs) -> LoraSummary:
    """Adds adapters to the model in place, and freezes all of its parameters. The model computes the same as before.

    From then on `nnx.Param` means the adapters alone: `train.init_state`, gradients and optimizers see nothing else. Frozen
    arrays are `layers.lora.Frozen`; none of them is copied. The adapters are f32 and whole on every device.

    Returns:
      What is trained: print it.

    Raises:
      ValueError: the model has adapters already, or modules that predict further tokens, or lies in the chunks of a pipeline.
        Or a matrix is not declared (`parallel.matrices`), or a name in `targets` or `ranks` is no target in this model.
        Or dropout for experts or routers. Nothing has been changed then.
    """
    settings = settings or LoraSettings()
    chosen = _chosen(model, settings)
    active_experts = model.config.experts.num_experts_per_tok if model.config.experts else 1
    mesh = mesh_of(nnx.state(model))
    freeze(model)
    for target in chosen:
        rank = settings.rank_of(target.kind, target.name, active_experts)
        adapter = _adapter_of(target, rank, settings, rngs)
        lay_everywhere(adapter, mesh)
        setattr(target.module, target.adapter, adapter)
    return lora_summary(model)


def lay_everywhere(adapter: Adapter, mesh: Mesh | None) -> None:
    """Puts the factors whole on every device of the mesh."""
    if mesh is not None:
        nnx.update(adapter, jax.device_put(nnx.state(adapter), NamedSharding(mesh, PartitionSpec())))


def check_can_adapt(model: Decoder) -> None:
    """Refuses a model that cannot get adapters; raises as `add_lora`."""
    if has_adapters(model):
        raise ValueError("the model has adapters already: merge them (merge_adapter), or load the model again")
    if model.config.mtp_stages:
        raise ValueError(
            "the model has modules that predict further tokens, which no adapter file can hold; load it without them: "
            "from_pretrained(..., mtp=False)"
        )
    refuse_chunks(nnx.state(model), "add_lora")


def _chosen(model: Decoder, settings: LoraSettings) -> list[Target]:
    """Returns the matrices that get an adapter, after all checks."""
    check_can_adapt(model)
    check_declared(nnx.to_flat_state(nnx.state(model, (nnx.Param, Frozen))))
    targets = list(targets_of(model))
    names = {kind for kind, *_ in targets} | {target.name for target in targets if target.kind in WITH_NAMES}
    if model.config.tie_word_embeddings and (tied := {*(settings.targets or ()), *settings.ranks} & OF_VOCABULARY):
        raise ValueError(
            f"LoraSettings: {', '.join(sorted(tied))} cannot have an adapter: the model's head is its embedding table, and an "
            "adapter's file would change one of them alone; leave the name out"
        )
    _check_names("targets", settings.targets or (), names)
    _check_names("ranks", settings.ranks, names)
    wanted = DEFAULT_TARGETS if settings.targets is None else settings.targets
    chosen = [target for target in targets if target.kind in wanted or (target.kind in WITH_NAMES and target.name in wanted)]
    without = dict.fromkeys(target.kind for target in chosen if target.kind not in WITH_DROPOUT)
    if settings.dropout and without:
        fitting = [kind for kind in WITH_DROPOUT if kind in names]
        raise ValueError(
            f"LoraSettings: dropout={settings.dropout} is for attention and mlp, and targets have {' and '.join(without)}, "
            f"whose changes read the rows of the frozen matrix. Give targets={fitting}"
        )
    return chosen


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
        # The sides of the hidden states: the input of the first matrices, and the output of the second.
        of_a, of_b = ((*of_a[:-1], 1), of_b) if target.weight == "gate_up_proj" else (of_a, (*of_b[:-1], 1))
    return Adapter(
        (*of_a, rank, num_in), (*of_b, num_out, rank), scale=settings.scale_of(rank), dropout=settings.dropout, rngs=rngs
    )
