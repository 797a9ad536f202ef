"""Loads a Hugging Face checkpoint, from a folder or the hub, as a model with its parameters on their devices.

config.json and file headers are checked before any weights are read or device memory is allocated. For a model on the hub,
config.json is checked before the weights are downloaded. Then weights stream (`streaming.py`): each process reads the slices
that its own devices hold, one layer of a parameter at a time.
"""

import logging
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from tqdm import tqdm

from moe_jax.checkpoint import streaming
from moe_jax.checkpoint.folders import previous_of
from moe_jax.checkpoint.hf_files import (
    FLOAT_DTYPES,
    SMALL_FILES,
    CheckpointError,
    Slices,
    StoredTensor,
    downloaded,
    open_tensors,
)
from moe_jax.checkpoint.hf_names import fused_tensors, hf_tensors
from moe_jax.checkpoint.quantised import as_floats, read_quantisation
from moe_jax.checkpoint.streaming import Piece
from moe_jax.config import ModelConfig, load_config
from moe_jax.layers.lora import freeze
from moe_jax.layers.moe import EXPERT_MATRICES
from moe_jax.layers.quantised import NF4_BLOCK
from moe_jax.models.auto import from_config
from moe_jax.models.decoder import Decoder, fp8_refusal
from moe_jax.models.inputs import float_dtype
from moe_jax.models.layers_in_pipe import layers_in_pipe
from moe_jax.models.precision import Weights, form_problems
from moe_jax.parallel.layout import parameter_sharding
from moe_jax.parallel.mesh import refuse_pipe
from moe_jax.parallel.pipeline.chunks import pipe_of, stacked_shape
from moe_jax.runtime.environment import program
from moe_jax.runtime.processes import is_first_process

_logger = logging.getLogger(__name__)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def from_pretrained(
    folder_or_hub_id: str | Path,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    param_dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    pipe_chunks: int = 1,
    mtp: bool = True,
    weights: Weights = "whole",
    progress: bool = True,
) -> Decoder:
    """Loads a Hugging Face checkpoint of any supported architecture; quantised weights are dequantised while loading.

    Arguments and errors as in `moe_jax.from_pretrained`, which also loads adapters and the output folders of runs.
    """
    pipe = pipe_of(mesh, pipe_chunks)
    dtype = float_dtype(dtype)
    param_dtype = dtype if param_dtype is None else float_dtype(param_dtype, "param_dtype")
    folder = find_checkpoint(folder_or_hub_id)
    config = load_config(folder)
    check_form(folder, weights)
    if weights != "whole" and mesh is not None:
        refuse_pipe(mesh, f"a model with weights={weights!r}")
    config, pieces, warnings = _checked_pieces(folder, config, mtp)
    layers = layers_in_pipe(config, pipe)
    for warning in warnings:
        _logger.warning("%s: %s", folder, warning)

    # eval_shape: the random initialisation is traced for its shapes and never computed.
    abstract = nnx.eval_shape(lambda: from_config(config, dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(0)))
    graph, parameters = nnx.split(abstract)
    leaves = []
    for path, leaf in nnx.to_flat_state(parameters):
        shape = stacked_shape(path, leaf.shape, layers, pipe)
        leaves.append((path, leaf, shape, parameter_sharding(path, shape, mesh)))
    size = sum(
        math.prod(stop - start for start, stop in part) * leaf.dtype.itemsize
        for _, leaf, shape, sharding in leaves
        for part in streaming.held_parts(shape, sharding)
    )  # fmt: skip
    loaded = []
    quiet = None if progress and is_first_process() else True
    with tqdm(total=size, unit="B", unit_scale=True, desc="loading", disable=quiet) as bar:
        for path, leaf, shape, sharding in leaves:
            layer_axes = 1 + len(shape) - len(leaf.shape) if path[0] == "stages" else 0
            array: Any = streaming.load_quantised(path, pieces[path], shape, leaf.dtype, sharding, weights, bar.update)
            if array is None:
                array = streaming.load_parameter(
                    pieces[path], shape, leaf.dtype, sharding, layer_axes=layer_axes, on_read=bar.update
                )  # fmt: skip
            loaded.append((path, leaf.replace(array)))
    model = nnx.merge(graph, nnx.from_flat_state(loaded))
    if weights != "whole":
        freeze(model)
    model.source = str(folder)
    return model


def read_config(folder_or_hub_id: str | Path, *, mtp: bool = True) -> ModelConfig:
    """Returns the config of the model that `from_pretrained` would load, after its checks.

    Reads config.json and file headers. It reads no weights except tensors that must equal a second copy.

    Raises:
      FileNotFoundError, ValueError: as `from_pretrained`.
    """
    folder = find_checkpoint(folder_or_hub_id)
    return _checked_pieces(folder, load_config(folder), mtp)[0]


def check_form(folder_or_hub_id: str | Path, weights: str) -> None:
    """Raises if `from_pretrained` does not support this form of weights for the checkpoint; reads only config.json.

    Raises:
      FileNotFoundError, ValueError: as `from_pretrained`.
    """
    folder = find_config(folder_or_hub_id)
    config, problems = load_config(folder), form_problems(weights)
    if weights == "as stored" and not is_stored_quantised(folder):
        problems.append(
            "weights='as stored' keeps quantised matrices, and this checkpoint has none that can be kept; use 'nf4' or 'whole'"
        )
    if weights == "nf4":
        problems += _problems_of_nf4(config)
    if weights == "fp8" and (reason := fp8_refusal(config, jnp.bfloat16)) is not None:
        problems.append(f"weights='fp8': {reason}; use 'whole' or 'nf4'")
    if problems:
        raise ValueError("; ".join(problems))


def _problems_of_nf4(config: ModelConfig) -> list[str]:
    """Refuses experts whose rows are not whole NF4 blocks, and a model without experts, where it would have no effect."""
    if config.experts is None or not config.routed_layers:
        return ["weights='nf4' makes 4 bits of experts, and this model has none; use 'whole'"]
    rows = dict(zip(EXPERT_MATRICES, (config.hidden_size, config.experts.moe_intermediate_size), strict=True))
    wrong = [f"experts.{name}: {size} is no multiple of {NF4_BLOCK}" for name, size in rows.items() if size % NF4_BLOCK]
    where = f"weights='nf4' has one scale per {NF4_BLOCK} elements of a row, and rows of this model do not end there"
    return [f"{where}: {', '.join(wrong)}; use 'whole'"] if wrong else []


def is_stored_quantised(folder: Path) -> bool:
    """Returns True if matrices of the checkpoint are stored in a form that can be kept; reads only config.json."""
    found = read_quantisation(folder)
    return found is not None and found[0] != "awq"  # its codes have zero points


def find_checkpoint(folder_or_hub_id: str | Path) -> Path:
    """Returns the checkpoint's local folder, downloading it if necessary; .bin files only if there are no safetensors.

    Raises:
      FileNotFoundError, ValueError: there is no such model, or its config is refused; both before weights are downloaded.
    """
    folder = find_config(folder_or_hub_id)
    if Path(folder_or_hub_id).expanduser().is_dir():
        return folder
    for weights in ("*.safetensors", "*.bin"):
        folder = downloaded(str(folder_or_hub_id), [*SMALL_FILES, weights])
        if any(folder.glob(weights)):
            break
    return folder


def find_config(folder_or_hub_id: str | Path) -> Path:
    """Returns the local folder with a model's config.json, downloaded without the weights if it is on the hub.

    Raises:
      FileNotFoundError: there is no such folder and no such model on the hub, or the folder has no config.json. Or it is the
        output folder of a run that is not finished.
      ValueError: its config is refused.
    """
    folder = Path(folder_or_hub_id).expanduser()
    if folder.is_dir():
        folder = folder.resolve()
        _check_is_finished(folder)
        if not (folder / "config.json").is_file() and (folder / "model" / "config.json").is_file():
            raise FileNotFoundError(
                f"no config.json in {folder}, which looks like the output folder of a run; did you mean the model in it, "
                f"{Path(folder_or_hub_id) / 'model'}?"
            )
    else:
        previous = previous_of(folder)
        if previous.is_dir():
            raise FileNotFoundError(f"a save to {folder} was cut short; the previous checkpoint is complete in {previous}")
        folder = downloaded(str(folder_or_hub_id), SMALL_FILES)
    load_config(folder)
    is_stored_quantised(folder)
    return folder


def _check_is_finished(folder: Path) -> None:
    """Refuses the output folder of a run that has not written its model yet."""
    written = "config.json", "model/config.json", "adapter/adapter_config.json"
    if not (folder / "checkpoints").is_dir() or any((folder / name).is_file() for name in written):
        return
    # Imported here: Orbax is slow to import, and no checkpoint needs it.
    from moe_jax.checkpoint.training import finished_steps

    steps = finished_steps(folder / "checkpoints")
    newest = f", whose newest checkpoint is of step {steps[-1]}" if steps else " without a checkpoint"
    convert = (
        f"; `{program()} convert {folder} TARGET --to hf` writes the model of that checkpoint (--merge in place of --to hf, if "
        "the run trained an adapter)"
    )
    raise FileNotFoundError(
        f"{folder} is the output folder of a run that is not finished{newest}: the command that began the run ends it"
        f"{convert if steps else ''}"
    )


def _checked_pieces(folder: Path, config: ModelConfig, mtp: bool) -> tuple[ModelConfig, dict[tuple, list[Piece]], list[str]]:
    """Checks the stored tensors against the config; raises CheckpointError with all differences.

    Returns the model's config, which may lack MTP modules or have an untied head; the stored pieces of each parameter, by path;
    and warnings.
    """
    problems: list[str] = []
    quantisation = read_quantisation(folder)
    stored = open_tensors(folder, problems)
    if not stored:
        raise CheckpointError(folder, problems)
    stored = _as_named_by_a_causal_model(stored)
    if config.tie_word_embeddings and EMBEDDING not in stored and HEAD in stored:
        stored[EMBEDDING] = stored.pop(HEAD)
    if quantisation is not None:
        stored = as_floats(stored, quantisation, problems)
    # Tensors of a module after the last layer, `model.layers.61.*` in DeepSeek-V3's checkpoint.
    behind = tuple(f"model.layers.{stage.first_layer}." for stage in config.mtp_stages)
    further = [name for name in stored if name.startswith(behind)]
    if further and mtp:
        further = []
    else:
        config = config.without_mtp()
    fused = {t.name: t for t in fused_tensors(config) if t.name in stored}
    replaced = {(t.path, t.index[0]) for t in fused.values()}
    wanted = {t.name: t for t in hf_tensors(config) if (t.path, *t.index[:1]) not in replaced} | fused
    stored |= {
        name: StoredTensor(folder, tensor.shape, "F32", _zeros)
        for name, tensor in wanted.items()
        if name not in stored and name.endswith(config.optional)
    }
    problems += [f"{name}: missing" for name, tensor in wanted.items() if name not in stored and not tensor.copy]
    for name, tensor in stored.items():
        if name not in wanted:
            if name not in further and tensor.size and not _ignored(name, config):
                problems.append(
                    f"{name}: unexpected in {tensor.file.name}, no such tensor in a {config.model_type} of this config"
                )
            continue
        if tensor.shape != wanted[name].shape:
            problems.append(f"{name}: shape {list(tensor.shape)} in {tensor.file.name}, expected {list(wanted[name].shape)}")
        if tensor.dtype not in FLOAT_DTYPES:
            problems.append(f"{name}: dtype {tensor.dtype} in {tensor.file.name}, expected one of {', '.join(FLOAT_DTYPES)}")
    if problems:
        raise CheckpointError(folder, problems)
    if config.tie_word_embeddings and HEAD in stored and not streaming.same_values(stored[EMBEDDING], stored[HEAD]):
        untied, pieces, warnings = _checked_pieces(folder, replace(config, tie_word_embeddings=False), mtp)
        warning = f"tie_word_embeddings=true, but {HEAD} is no copy of {EMBEDDING}: both are loaded"
        return untied, pieces, [warning, *warnings]
    warnings = []
    if unread := [name for name in stored if name not in wanted and _is_unread(name, config)]:
        warnings.append(f"{len(unread)} tensors are not read, and an export will lack them (first: {unread[0]})")
    names = {place.path: name for name, place in wanted.items() if not place.copy}
    pieces = defaultdict(list)
    for name, place in wanted.items():
        if not place.copy:
            pieces[place.path].append(streaming.piece_of(place, stored[name]))
        elif name in stored and not streaming.same_values(stored[name], stored[original := names[place.path]]):
            warnings.append(f"{name} is no copy of {original}, which is taken for both")
    return config, pieces, warnings


def _as_named_by_a_causal_model(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Adds the prefix `model.` to the tensors of a checkpoint that has no head and no prefix (Qwen3-Embedding)."""
    if "embed_tokens.weight" not in stored or any(name.startswith("model.") for name in stored):
        return stored
    return {name if name.startswith("lm_head.") else f"model.{name}": tensor for name, tensor in stored.items()}


def _ignored(name: str, config: ModelConfig) -> bool:
    """Returns True for tensors that no model reads: rotary tables, a head tied to the embedding, and `config.unread`."""
    return _is_unread(name, config) or name.endswith(".rotary_emb.inv_freq") or (name == HEAD and config.tie_word_embeddings)


def _is_unread(name: str, config: ModelConfig) -> bool:
    return any(part.format(behind=config.num_hidden_layers) in name for part in config.unread)


def _zeros(slices: Slices) -> np.ndarray:
    return np.zeros([part.stop - part.start for part in slices], np.float32)
