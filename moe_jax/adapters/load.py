"""Loads a checkpoint, and adapters that PEFT or `save_adapter` wrote.

Files of adapters have each expert's factors separately, or fused layouts of experts.
"""

import logging
import re
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from safetensors import SafetensorError
from safetensors.numpy import load_file

from moe_jax.adapters.add import WITH_DROPOUT, LoraSummary, check_can_adapt, lora_summary, put_adapter, train_whole
from moe_jax.adapters.names import (
    PREFIX,
    Change,
    ModulePart,
    Target,
    WholeModule,
    factors_apart,
    fused_parts,
    modules_of,
    parameter_name,
    whole_modules,
)
from moe_jax.adapters.save import ROWS, WEIGHTS_FILE
from moe_jax.adapters.source import BASE_FILE, CONFIG_FILE, source_of, warn_of_another_base
from moe_jax.adapters.token_rows import EMBEDDING, HEAD, check_tokens, extend_vocabulary, train_rows
from moe_jax.checkpoint import hf_load
from moe_jax.checkpoint.companions import read_json
from moe_jax.checkpoint.hf_files import downloaded
from moe_jax.config import ModelConfig
from moe_jax.layers.lora import Adapter, freeze
from moe_jax.models.auto import from_config
from moe_jax.models.decoder import Decoder
from moe_jax.models.precision import Weights
from moe_jax.parallel.layout import mesh_of
from moe_jax.parallel.pipeline.chunks import refuse_chunks

_logger = logging.getLogger(__name__)


def from_pretrained(
    folder_or_hub_id: str | Path,
    *,
    adapter: str | Path | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    param_dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    pipe_chunks: int = 1,
    mtp: bool = True,
    weights: Weights = "whole",
    progress: bool = True,
) -> Decoder:
    """Loads a checkpoint of any architecture of `moe_jax.models`; a quantised one is dequantised on the way.

    Args:
      folder_or_hub_id: a folder with config.json and weights, or a hub id such as "Qwen/Qwen3-30B-A3B", which is downloaded.
        Or the output folder of a run, which holds a model, or an adapter that names its weights; or an adapter's folder.
      adapter: a folder or hub id of an adapter (LoRA) to add, as `adapters.load_adapter` does. All weights are then frozen.
        `adapters.merge_adapter` merges it into them.
      dtype: the dtype in which the model computes.
      param_dtype: the dtype of the parameters, independent of the files' (default: dtype). float32 for training. A bias that no
        gradient reaches (`layers.router.ExpertBias`) is always float32.
      mesh: the devices to spread the parameters over (`moe_jax.parallel.make_mesh`); None: the default device.
      pipe_chunks: with several devices along `pipe`, the chunks of layers of each rank, as in `parallel.Parallelism`. Layers
        are loaded only onto their ranks, stacked as by `parallel.pipeline.chunks.to_chunks`. Such a model can be trained and
        saved.
      mtp: True loads multi-token prediction modules, if the checkpoint has some (`models.mtp`; 11.6e9 parameters in
        DeepSeek-V3). False leaves more memory for inference; a checkpoint written from the model then lacks them. Adapters do
        not support them: with an adapter they are left out.
      weights: "as stored" keeps matrices stored in FP8 or 4 bits (`checkpoint.quantised`) as they are. "nf4" quantises the
        experts' matrices to 4 bits (`layers.quantised`), "fp8" to FP8. A layer is dequantised when it is computed, except
        experts in FP8 after `model.set_precision("fp8")`. All parameters are frozen (`layers.lora.Frozen`): such a model can
        compute, and train adapters (`adapters.add_lora`). On a mesh quantised matrices are split like others, in whole blocks.
      progress: show a progress bar when stderr is a terminal.

    Raises:
      FileNotFoundError: there is no such folder and no such model on the hub, or the folder of an adapter lacks a file.
      ValueError: dtype or param_dtype is no float dtype, or config.json asks for an unsupported feature. Or the layers cannot
        be split over the mesh's pipe: sparse layers precede dense ones, or there are too few layers. Or the adapter does not
        fit the model, or this checkpoint or mesh does not support `weights`.
      CheckpointError (a ValueError): tensors are missing, unexpected, or of a wrong shape or dtype, or files are absent,
        truncated or corrupt; one error lists all problems.
      ImportError: the weights are .bin files, and torch is not installed.
    """
    source = source_of(folder_or_hub_id, adapter)
    options: Any = dict(dtype=dtype, param_dtype=param_dtype, mesh=mesh, pipe_chunks=pipe_chunks, weights=weights)
    model = hf_load.from_pretrained(source.weights, mtp=mtp and source.adapter is None, progress=progress, **options)
    if source.adapter is not None:
        load_adapter(model, source.adapter)
    return model


def load_adapter(model: Decoder, adapter: str | Path, *, b_grouped_by_expert: bool = False) -> LoraSummary:
    """Adds the adapters of a folder, or of a repository on the hub, to the model, and freezes its parameters.

    It reads separate factors for each expert, as `save_adapter`, Megatron-Bridge and PEFT on transformers 4 write them. It also
    reads the fused layouts in `adapters.names`. If gate and up have different a's, they are joined exactly, at twice the
    rank. Warns if the adapter was trained on other weights, as far as its files show (`adapters.source`). Also warns if its
    config names the experts' projections but none of them was trained.

    Args:
      b_grouped_by_expert: Unsloth wrote the file before September 2026. Its fused b keeps each expert's columns together, and
        nothing in the file shows it.

    Returns:
      A summary of the adapted matrices, to print.

    Raises:
      FileNotFoundError: there is no adapter_config.json, or no adapter_model.safetensors.
      ValueError: `add_lora` refuses the model; or the file is not plain LoRA. Or a tensor is not a factor of one of this
        model's modules, or has a wrong shape. Or factors of some layers or experts are missing. The model is then unchanged.
    """
    read = read_adapter(model, adapter, b_grouped_by_expert)
    put_stacks(model, read.stacks)
    _put_whole(read.whole)
    extend_vocabulary(model, read.rows.vocab_size, rows=read.rows.new)
    train_rows(model, read.rows.tokens, read.rows.values)
    return lora_summary(model)


def check_adapter(config: ModelConfig, adapter: str | Path, source: str | None = None) -> "ReadAdapter":
    """Reads an adapter for a model of this config, without loading the model; errors as in `load_adapter`.

    Args:
      source: the folder of the weights, to warn of an adapter of others.
    """
    # Its arrays are only shapes.
    model = nnx.eval_shape(lambda: from_config(config, rngs=nnx.Rngs(0)))
    model.source = source
    return read_adapter(model, adapter)


class Stack(NamedTuple):
    """The change b a of a target's matrices for all layers and experts, on the host; b includes the scale."""

    target: Target
    a: np.ndarray
    b: np.ndarray
    dropout: float = 0.0

    @classmethod
    def zeros(cls, target: Target, rank: int) -> "Stack":
        """Returns a zero change of this rank."""
        *leading, num_out, num_in = target.shape
        return cls(target, np.zeros((*leading, rank, num_in), np.float32), np.zeros((*leading, num_out, rank), np.float32))


Whole = list[tuple[WholeModule, np.ndarray]]
"""Modules that are trained whole, with their weights."""


class ReadRows(NamedTuple):
    """The rows of an adapter's file for tables of the vocabulary, by table."""

    vocab_size: int
    """The number of tokens with them."""
    tokens: dict[str, list[int]]
    """The tokens whose rows are trained alone."""
    values: dict[str, np.ndarray]
    """These rows."""
    new: dict[str, np.ndarray]
    """All rows after the model's vocabulary, if PEFT wrote the whole table."""


class ReadAdapter(NamedTuple):
    """The contents of an adapter's folder."""

    stacks: list[Stack]
    whole: Whole
    rows: ReadRows


def read_adapter(model: Decoder, adapter: str | Path, b_grouped_by_expert: bool = False) -> ReadAdapter:
    """Reads the adapters in a folder, and what was trained next to them. The model is not changed.

    Arguments and errors as in `load_adapter`.
    """
    check_can_adapt(model)
    refuse_chunks(nnx.state(model), "load_adapter")
    folder = Path(adapter) if Path(adapter).is_dir() else downloaded(str(adapter), [CONFIG_FILE, WEIGHTS_FILE, BASE_FILE])
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} has no {name}: an adapter folder has {CONFIG_FILE} and {WEIGHTS_FILE}")
    config = read_json(folder / CONFIG_FILE)
    _check_config(config, folder)
    modules = modules_of(model)
    try:
        tensors = load_file(folder / WEIGHTS_FILE)
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{folder / WEIGHTS_FILE} cannot be read: {error}") from error
    whole = _taken_whole(tensors, model, config, folder)
    rows = _taken_rows(tensors, model, config, folder)
    own_names = model.config.module_names
    factors = _factors_of_modules(tensors, modules, config, folder, b_grouped_by_expert, own_names)
    targets = list(dict.fromkeys(module.target for module in modules))
    _check_whole(modules, factors, config, folder)
    warn_of_another_base(model.source, folder, config)
    stacks = [stack for target in targets if (stack := _stacked(target, modules, factors))]
    dropout = config.get("lora_dropout") or 0.0
    stacks = [stack._replace(dropout=dropout) if stack.target.kind in WITH_DROPOUT else stack for stack in stacks]
    return ReadAdapter(_with_whole_experts(stacks, targets), whole, rows)


def put_stacks(model: Decoder, stacks: list[Stack]) -> None:
    """Adds adapters to the model, and freezes its parameters."""
    mesh = mesh_of(nnx.state(model))
    freeze(model)
    for stack in stacks:
        made = Adapter(stack.a.shape, stack.b.shape, scale=1.0, dropout=stack.dropout, rngs=nnx.Rngs(0))
        made.a[...], made.b[...] = jnp.asarray(stack.a), jnp.asarray(stack.b)
        put_adapter(stack.target, made, mesh)


def _put_whole(whole: Whole) -> None:
    """Makes the modules trainable, with these weights."""
    train_whole([module for module, _ in whole])
    for each, array in whole:
        weight = each.module.weight
        weight.set_value(jax.device_put(weight.get_value().at[each.layer].set(array), weight.get_value().sharding))


MEANINGS = (
    *("bias", "use_dora", "use_qalora", "use_bdlora", "lora_bias", "fan_in_fan_out"),
    *("layer_replication", "alora_invocation_tokens", "arrow_config", "kasa_config"),
    "monteclora_config",
)
"""PEFT's settings with which the change is not just b a."""
CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of PEFT's `init_lora_weights` that subtract the initial b a from the frozen weights; some have a suffix."""


def _check_config(config: dict[str, Any], folder: Path) -> None:
    """Refuses settings that would otherwise be ignored silently."""
    found = [name for name in MEANINGS if config.get(name) not in (None, False, "none", [], {})]
    if config.get("peft_type") != "LORA":
        found.insert(0, "peft_type")
    if str(config.get("init_lora_weights")).startswith(CHANGED_BASES):
        found.append("init_lora_weights")
    if found:
        raise ValueError(
            f"{folder}: {', '.join(f'{name}={config.get(name)!r}' for name in found)} is not supported: an adapter must be "
            "plain LoRA on unchanged weights, without biases"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise ValueError(
            f"{folder / CONFIG_FILE} must have a positive integer r and a number lora_alpha; got {rank} and {alpha}"
        )


def _taken_whole(tensors: dict[str, np.ndarray], model: Decoder, config: dict[str, Any], folder: Path) -> Whole:
    """Removes the weights of modules_to_save from `tensors` and returns them with their modules."""
    names = tuple(config.get("modules_to_save") or ())
    if unknown := [name for name in names if not whole_modules(model, (name,))]:
        raise ValueError(
            f"{folder}: modules_to_save has {', '.join(map(repr, unknown))}, which this model cannot train whole: only norms, "
            "routers, and an embedding and a head that are not tied"
        )
    found: Whole = []
    for each in whole_modules(model, names) if names else ():
        array, shape = tensors.pop(f"{PREFIX}{each.name}.weight", None), each.tensor.shape
        if array is None or array.shape != shape:
            got = "is missing" if array is None else f"has the shape {array.shape}"
            raise ValueError(f"{folder}: modules_to_save: {each.name}.weight {got}; it must have the shape {shape}")
        found.append((each, np.asarray(array, np.float32)))
    return found


def _taken_rows(tensors: dict[str, np.ndarray], model: Decoder, config: dict[str, Any], folder: Path) -> ReadRows:
    """Removes the tables of the vocabulary from `tensors`, and returns the rows that are trained alone.

    PEFT writes frozen tables along with their factors. They must equal the model's; with rows that are trained alone they may
    be longer.
    """
    given, where = config.get("trainable_token_indices") or {}, f"{folder}: trainable_token_indices"
    names = {EMBEDDING.rsplit(".", 1)[-1]: EMBEDDING, EMBEDDING: EMBEDDING, HEAD: HEAD}
    chosen = given if isinstance(given, dict) else {EMBEDDING: given}
    if unknown := [name for name in chosen if name not in names]:
        raise ValueError(f"{where} has {unknown[0]!r}, which is no table of the vocabulary: {', '.join(names)}")
    tokens = {names[name]: list(ids) for name, ids in chosen.items()}
    tables, size = model.tables, model.config.vocab_size
    values, new = {}, {}
    for name in (EMBEDDING, HEAD):
        table = tables.get(name, model.embed_tokens).weight
        for end in ("base_layer.weight", "weight", "token_adapter.base_layer.weight"):
            array = tensors.pop(full := f"{PREFIX}{name}.{end}", None)
            if array is not None and not _is_copy(array[:size] if tokens else array, table.get_value()):
                raise ValueError(
                    f"{folder}: {full} {list(array.shape)} differs from the model's {list(table.shape)}: the vocabulary was "
                    "resized or trained, or belongs to another model. An adapter cannot replace it"
                )
            if array is not None:
                new[name] = array[size:]
        if (rows := tensors.pop(f"{PREFIX}{name}.{ROWS}", None)) is not None:
            values[name] = rows
    if HEAD not in tables and HEAD in tokens.keys() | values.keys():
        found: tuple[dict[str, Any], ...] = (tokens, values)
        pairs = [(np.asarray(each.pop(HEAD, each.get(EMBEDDING))), np.asarray(each.get(EMBEDDING))) for each in found]
        if not all(np.array_equal(*pair) for pair in pairs):
            raise ValueError(f"{where} or their rows differ between {EMBEDDING} and {HEAD}, which are one table in this model")
    extended = size + max(map(len, new.values()), default=0)
    for name, ids in tokens.items():
        check_tokens(ids, extended, where)
        wanted, got = (len(ids), table.shape[1]), values[name].shape if name in values else "no rows"
        if got != wanted:
            raise ValueError(f"{where}: {PREFIX}{name}.{ROWS} must have the shape {wanted}; the file has {got}")
    if values.keys() - tokens.keys():
        raise ValueError(
            f"{folder}: {CONFIG_FILE} has no trainable_token_indices for {', '.join(values.keys() - tokens.keys())}"
        )
    return ReadRows(max([extended, *(1 + max(ids) for ids in tokens.values() if ids)]), tokens, values, new)


def _is_copy(array: np.ndarray, table: Any) -> bool:
    """Compares a file's table with the model's in either dtype; only the shapes if the model's is quantised or abstract."""
    if array.shape != table.shape or not isinstance(table, jax.Array):
        return array.shape == table.shape
    given = jax.device_put(array, table.sharding)
    return any(bool((given.astype(dtype) == table.astype(dtype)).all()) for dtype in (table.dtype, given.dtype))


def _factors_of_modules(
    tensors: dict[str, np.ndarray],
    modules: list[ModulePart],
    config: dict[str, Any],
    folder: Path,
    b_grouped_by_expert: bool,
    of_modules: dict[str, str],
) -> dict[str, Change]:
    """Returns the factors by module name, after checking that every tensor is used and has the right shape.

    Args:
      of_modules: `ModelConfig.module_names`, the other names that a file may use.
    """
    by_module: dict[str, dict[str, np.ndarray]] = defaultdict(dict)
    for name, array in tensors.items():
        match = re.fullmatch(re.escape(PREFIX) + r"(.+)\.lora_(A|B|embedding_A|embedding_B)(?:\.weight)?", name)
        if match is None:
            raise ValueError(
                f"{folder}: {name} is not a factor of an adapter; factors are {PREFIX}MODULE.lora_A.weight, lora_B"
            )
        factor, array = match[2], np.asarray(array, np.float32)
        if factor.startswith("embedding"):
            # The factors of the transposed table.
            factor, array = {"embedding_A": "B", "embedding_B": "A"}[factor], array.T
        module = match[1] + "."
        for hub, own in of_modules.items():
            module = module.replace(own, hub)
        by_module[module.removesuffix(".")][factor] = array
    known, factors = {module.name: module for module in modules}, {}
    for name, pair in by_module.items():
        if missing := {"A", "B"} - pair.keys():
            raise ValueError(f"{folder}: {name} has no lora_{missing.pop()}")
        if name in known:
            factors[name] = _scaled(name, pair["A"], pair["B"], config)
        elif parts := fused_parts(name, modules):
            try:
                apart = factors_apart(pair["A"], pair["B"], parts, config.get("peft_version"), b_grouped_by_expert)
            except ValueError as error:
                raise ValueError(f"{folder}: {name} {error}") from error
            factors |= {of: _scaled(parameter_name(parts), a, b, config) for of, (a, b) in apart.items()}
        else:
            tied = (
                "; its head and embedding share one matrix, but an adapter changes only one"
                if name in (EMBEDDING, HEAD)
                else ""
            )
            raise ValueError(f"{folder}: this model has no module {name} that an adapter can change{tied}")
    for name, (a, b) in factors.items():
        module = known[name]
        num_out, num_in = _matrix(module)
        if a.shape[1:] != (num_in,) or b.shape != (num_out, len(a)):
            raise ValueError(
                f"{folder}: {name} has factors {a.shape} and {b.shape}; they must be (r, {num_in}) and ({num_out}, r)"
            )
    return factors


def _check_whole(modules: list[ModulePart], factors: dict[str, Change], config: dict[str, Any], folder: Path) -> None:
    """Refuses a file that lacks factors of some layers or experts, and warns if its experts were never adapted."""
    named = config.get("target_modules") or []
    names = [named] if isinstance(named, str) else named
    chosen = isinstance(named, str) or any(
        config.get(name) not in (None, [], "") for name in ("layers_to_transform", "exclude_modules")
    )
    if not chosen and not re.search(r"\d", " ".join([*names, *(config.get("target_parameters") or ())])):
        kinds: dict[tuple[Target, str], list[ModulePart]] = defaultdict(list)
        for module in modules:
            kinds[module.target, module.leaf].append(module)
        for alike in kinds.values():
            missing = [module.name for module in alike if module.name not in factors]
            if 0 < len(missing) < len(alike):
                raise ValueError(
                    f"{folder}: {missing[0]} has no factors. {len(missing)} of {len(alike)} modules of this kind have none, "
                    f"and {CONFIG_FILE} does not leave them out: the file is incomplete"
                )
    of_experts = {module.leaf for module in modules if module.expert is not None}
    asked = of_experts if named == "all-linear" else of_experts & set(names)
    adapted = any(module.name in factors for module in modules if module.expert is not None)
    if asked and not adapted and not config.get("target_parameters"):
        _logger.warning(
            "%s names %s, but no expert has factors: they were not trained. PEFT on transformers 5 needs target_parameters",
            folder / CONFIG_FILE,
            ", ".join(sorted(asked)),
        )


def _matrix(module: ModulePart) -> tuple[int, int]:
    """Returns the shape [out, in] of a module's matrix."""
    *_, num_out, num_in = module.target.shape
    return len(range(num_out)[module.rows]), num_in


def _scaled(name: str, a: np.ndarray, b: np.ndarray, config: dict[str, Any]) -> Change:
    """Multiplies b by the scale that PEFT gives the module: alpha / rank, or alpha / sqrt(rank)."""
    rank = _by_pattern(config.get("rank_pattern"), name, config["r"])
    alpha = _by_pattern(config.get("alpha_pattern"), name, config["lora_alpha"])
    return Change(a, b * np.float32(alpha / (rank**0.5 if config.get("use_rslora") else rank)))


def _by_pattern(patterns: dict[str, Any] | None, name: str, default: Any) -> Any:
    """Returns the value of the first pattern that the end of the module's name matches, as PEFT does."""
    found = (value for pattern, value in (patterns or {}).items() if re.match(rf"(.*\.)?({pattern})$", name))
    return next(found, default)


def _stacked(target: Target, modules: list[ModulePart], factors: dict[str, Change]) -> Stack | None:
    """Returns the factors of all layers and experts, with zeros for those missing in the file; None if all are missing."""
    matrices: dict[tuple, list[tuple[ModulePart, Change]]] = defaultdict(list)
    for module in modules:
        if module.target is target and module.name in factors:
            matrices[module.layer, module.expert].append((module, factors[module.name]))
    if not matrices:
        return None
    joined = {place: _joined(parts, target.shape[-2]) for place, parts in matrices.items()}
    stack = Stack.zeros(target, max(len(a) for a, _ in joined.values()))
    for (layer, expert), (a, b) in joined.items():
        place = (layer,) if expert is None else (layer, expert)
        stack.a[place][: len(a)], stack.b[place][:, : len(a)] = a, b
    return stack


def _with_whole_experts(stacks: list[Stack], targets: list[Target]) -> list[Stack]:
    """Adds a zero change for an experts' matrix if only the other one has a change: the experts need both or neither."""
    found = {stack.target for stack in stacks}
    adapted = {target.path for target in found if target.kind == "experts"}
    missing = [target for target in targets if target.path in adapted and target not in found]
    return stacks + [Stack.zeros(target, 1) for target in missing]


def _joined(parts: list[tuple[ModulePart, Change]], num_out: int) -> Change:
    """Joins the changes of parts of a matrix's rows, such as gate and up: with one a if they share it, else with both."""
    shared = all(np.array_equal(parts[0][1].a, own.a) for _, own in parts)
    a = parts[0][1].a if shared else np.concatenate([own.a for _, own in parts])
    b, first = np.zeros((num_out, len(a)), np.float32), 0
    for module, own in parts:
        b[module.rows, first : first + len(own.a)] = own.b
        first += 0 if shared else len(own.a)
    return Change(a, b)
