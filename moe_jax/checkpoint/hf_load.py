"""A Hugging Face checkpoint, in a folder or on the hub, as a model whose parameters already lie where they belong.

Everything is checked from config.json and file headers before a byte of weights is read or of device memory is taken; of a
model on the hub, config.json before the weights are downloaded. Then weights stream (`streaming.py`): each process reads the
slices that its own devices hold, a layer of a parameter at a time.
"""

import logging
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from tqdm import tqdm

from moe_jax.checkpoint.folders import previous_of
from moe_jax.checkpoint.fp8 import dequantised, read_block_size
from moe_jax.checkpoint.hf_files import FLOAT_DTYPES, CheckpointError, StoredTensor, open_tensors
from moe_jax.checkpoint.hf_names import fused_tensors, hf_tensors
from moe_jax.checkpoint.hub import SMALL_FILES, downloaded
from moe_jax.checkpoint.streaming import Piece, held_parts, load_parameter, num_elements, piece_of, same_values
from moe_jax.config import ModelConfig, load_config
from moe_jax.models.auto import from_config
from moe_jax.models.decoder import Decoder
from moe_jax.models.inputs import float_dtype
from moe_jax.parallel.layout import parameter_sharding
from moe_jax.runtime.processes import is_first_process

_logger = logging.getLogger(__name__)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def from_pretrained(
    folder_or_hub_id: str | Path,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    param_dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    mtp: bool = True,
    progress: bool = True,
) -> Decoder:
    """Loads a checkpoint of any architecture of `moe_jax.models`; one in FP8 is dequantised on the way (`checkpoint.fp8`).

    Args:
      folder_or_hub_id: a folder with config.json and weights, or a hub id such as "Qwen/Qwen3-30B-A3B", which is downloaded.
      dtype: what the model computes in.
      param_dtype: what the parameters are held in, whatever the files hold (default: dtype). float32 for training. A bias
        that no gradient reaches (`layers.router.ExpertBias`) is float32 always.
      mesh: the devices to spread the parameters over (`moe_jax.parallel.make_mesh`); None: the default device.
      mtp: with the modules that predict further tokens, if the checkpoint has some (`models.mtp`; 11.6e9 parameters in
        DeepSeek-V3). Without them there is more memory for inference; a checkpoint written from the model lacks them then.
      progress: show a progress bar when stderr is a terminal.

    Raises:
      FileNotFoundError: there is no such folder and no such model on the hub.
      ValueError: a dtype is none, config.json asks for something that is not supported, or (CheckpointError) tensors are
        missing, unexpected, of a wrong shape or dtype, or files are absent, truncated or corrupt; one error lists all of them.
      ImportError: .bin files, and no torch to read them.
    """
    dtype = float_dtype(dtype)
    param_dtype = dtype if param_dtype is None else float_dtype(param_dtype, "param_dtype")
    folder = find_checkpoint(folder_or_hub_id)
    config = load_config(folder)
    config, pieces, warnings = _checked_pieces(folder, config, mtp)
    for warning in warnings:
        _logger.warning("%s: %s", folder, warning)

    # eval_shape: the random initialisation is traced for its shapes and never computed.
    abstract = nnx.eval_shape(lambda: from_config(config, dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(0)))
    graph, parameters = nnx.split(abstract)
    leaves = [
        (path, leaf, parameter_sharding(path, leaf.shape, mesh)) for path, leaf in nnx.to_flat_state(parameters)
    ]  # fmt: skip
    size = sum(
        num_elements(part) * leaf.dtype.itemsize
        for _, leaf, sharding in leaves
        for part in held_parts(leaf.shape, sharding)
    )  # fmt: skip
    loaded = []
    quiet = None if progress and is_first_process() else True
    with tqdm(total=size, unit="B", unit_scale=True, desc="loading", disable=quiet) as bar:
        for path, leaf, sharding in leaves:
            stacked = path[0] == "stages"
            array = load_parameter(
                pieces[path], leaf.shape, leaf.dtype, sharding, stacked=stacked, on_read=bar.update
            )  # fmt: skip
            loaded.append((path, leaf.replace(array)))
    model = nnx.merge(graph, nnx.from_flat_state(loaded))
    model.source = str(folder)
    return model


def read_config(folder_or_hub_id: str | Path, *, mtp: bool = True) -> ModelConfig:
    """The config of the model that `from_pretrained` would load, after its checks.

    Reads config.json and file headers, and of the weights only what should be stored twice alike.

    Raises:
      FileNotFoundError, ValueError: as `from_pretrained`.
    """
    folder = find_checkpoint(folder_or_hub_id)
    return _checked_pieces(folder, load_config(folder), mtp)[0]


def find_checkpoint(folder_or_hub_id: str | Path) -> Path:
    """The local folder, downloaded if it is on the hub; .bin files only where there are no others.

    Raises:
      FileNotFoundError, ValueError: there is no such model, or its config is refused, before its weights are downloaded.
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
    """The local folder with a model's config.json, downloaded without the weights if it is on the hub.

    Raises:
      FileNotFoundError: there is no such folder and no such model on the hub, or the folder has no config.json.
      ValueError: its config is refused.
    """
    folder = Path(folder_or_hub_id).expanduser()
    if folder.is_dir():
        folder = folder.resolve()
        if not (folder / "config.json").is_file() and (folder / "model" / "config.json").is_file():
            raise FileNotFoundError(
                f"no config.json in {folder}, which looks like the output folder of a run; did you mean the model in it, "
                f"{Path(folder_or_hub_id) / 'model'}?"
            )
    else:
        previous = previous_of(folder)
        if previous.is_dir():
            raise FileNotFoundError(f"a save to {folder} was cut short; the checkpoint that was there lies whole in {previous}")
        folder = downloaded(str(folder_or_hub_id), SMALL_FILES)
    load_config(folder)
    read_block_size(folder)
    return folder


def _checked_pieces(folder: Path, config: ModelConfig, mtp: bool) -> tuple[ModelConfig, dict[tuple, list[Piece]], list[str]]:
    """The config of what is to be loaded, where each parameter's parts are stored, and what a user may want to know of them.

    Raises CheckpointError with everything that does not fit the config.
    """
    problems: list[str] = []
    block_size = read_block_size(folder)
    stored = open_tensors(folder, problems)
    if not stored:
        raise CheckpointError(folder, problems)
    stored = _as_named_by_a_causal_model(stored)
    if config.tie_word_embeddings and EMBEDDING not in stored and HEAD in stored:
        stored[EMBEDDING] = stored.pop(HEAD)
    if block_size is not None:
        stored = dequantised(stored, block_size, problems)
    further = [name for name in stored if _predicts_further(name, config)]
    if further and mtp:
        further = []
    else:
        config = config.without_mtp()
    fused = {t.name: t for t in fused_tensors(config) if t.name in stored}
    replaced = {(t.path, t.index[0]) for t in fused.values()}
    wanted = {t.name: t for t in hf_tensors(config) if (t.path, *t.index[:1]) not in replaced} | fused
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
    if config.tie_word_embeddings and HEAD in stored and not same_values(stored[EMBEDDING], stored[HEAD]):
        config, untied, warnings = _checked_pieces(folder, replace(config, tie_word_embeddings=False), mtp)
        warning = f"tie_word_embeddings=true, but {HEAD} is no copy of {EMBEDDING}: both are loaded"
        return config, untied, [warning, *warnings]
    warnings = []
    names = {place.path: name for name, place in wanted.items() if not place.copy}
    pieces = defaultdict(list)
    for name, place in wanted.items():
        if not place.copy:
            pieces[place.path].append(piece_of(place, stored[name]))
        elif name in stored and not same_values(stored[name], stored[original := names[place.path]]):
            warnings.append(f"{name} is no copy of {original}, which is taken for both")
    return config, pieces, warnings


def _predicts_further(name: str, config: ModelConfig) -> bool:
    """Whether the tensor is of a module behind the last layer, `model.layers.61.*` in DeepSeek-V3's checkpoint."""
    return any(name.startswith(f"model.layers.{stage.first_layer}.") for stage in config.mtp_stages)


def _as_named_by_a_causal_model(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors under `model.`, which a checkpoint of the model without a head (Qwen3-Embedding) leaves out."""
    if "embed_tokens.weight" not in stored or any(name.startswith("model.") for name in stored):
        return stored
    return {name if name.startswith("lm_head.") else f"model.{name}": tensor for name, tensor in stored.items()}


def _ignored(name: str, config: ModelConfig) -> bool:
    """Tensors that other programs write and that the model computes itself: rotary tables, a head tied to the embedding."""
    return name.endswith(".rotary_emb.inv_freq") or (name == HEAD and config.tie_word_embeddings)
