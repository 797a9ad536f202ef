"""Writes a model as a Hugging Face checkpoint folder, which transformers and every inference engine loads."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from flax import nnx
from safetensors.numpy import save_file
from tqdm import tqdm

from moe_jax.checkpoint.companions import Companions, write_json
from moe_jax.checkpoint.folders import replaced_folder
from moe_jax.checkpoint.hf_names import export, hf_tensors
from moe_jax.checkpoint.quantised import export_in_fp8, sizes_in_fp8
from moe_jax.models.decoder import Decoder
from moe_jax.runtime.processes import is_first_process


def save_pretrained(
    model: Decoder,
    folder: str | Path,
    *,
    tokenizer_from: str | Path | None = None,
    chat_template: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
    fp8: bool = False,
    progress: bool = True,
) -> None:
    """Writes a Hugging Face checkpoint with one tensor per expert, in the parameters' dtype or in FP8.

    The folder gets model.safetensors, or model-0000i-of-0000n.safetensors with an index if it would be larger than
    `max_shard_bytes`; config.json; generation_config.json; and the tokenizer's files. It is replaced as a whole at the end. So
    a crash leaves an old checkpoint intact, and saving into the folder that the model came from works. Files there that are not
    part of a checkpoint stay. One shard at a time is in host memory. The layers of a pipeline are written like all others.

    Args:
      tokenizer_from: the folder or hub id whose tokenizer files to copy (default: the folder that the model was loaded from, if
        any).
      chat_template: a Jinja template that replaces the tokenizer's own.
      max_shard_bytes: the largest size of a file, unless a single tensor is larger.
      fp8: write all projections in e4m3 with a scale for 128 x 128, as DeepSeek-V3 and Qwen3-*-FP8 are published. Half the
        bytes of bf16. Matrices already in FP8 are written unchanged. False: such a model is refused.
      progress: show a progress bar when stderr is a terminal.

    Raises:
      FileExistsError: `folder` is a file, or has files and no config.json, so it is not a checkpoint that may be replaced.
      FileNotFoundError: `tokenizer_from` has no tokenizer files, or is neither a folder nor a model on the hub.
      ValueError: `max_shard_bytes` is not positive, or `folder` is a mount point, the current directory or holds it. Or the
        model has adapters, or quantised weights that these files cannot hold.
    """
    if max_shard_bytes <= 0:
        raise ValueError(f"max_shard_bytes={max_shard_bytes} must be positive")
    companions = Companions(model, tokenizer_from, chat_template, fp8=fp8)
    with replaced_folder(folder, companions.replaces) as target:
        _write_weights(model, target, max_shard_bytes, progress, fp8=fp8)
        if is_first_process():
            companions.write(target)


def _write_weights(model: Decoder, folder: Path, max_shard_bytes: int, progress: bool, *, fp8: bool) -> None:
    """Writes all shards and, if there are several, their index. All processes take part in `export`; the first one writes."""
    flat = dict(nnx.to_flat_state(nnx.state(model)))
    if fp8:
        sizes, tensors = sizes_in_fp8(model.config, flat), export_in_fp8(model.config, flat)
    else:
        sizes = {each.name: math.prod(each.shape) * flat[each.path].dtype.itemsize for each in hf_tensors(model.config)}
        tensors = export(model.config, flat)
    shards = list(_shards(sizes, max_shard_bytes))
    weight_map: dict[str, str] = {}
    quiet = None if progress and is_first_process() else True
    with tqdm(total=sum(sizes.values()), unit="B", unit_scale=True, desc="saving", disable=quiet) as bar:
        for i, names in enumerate(shards):
            file = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            shard = {}
            for name in names:
                found, array = next(tensors)
                assert found == name
                # The file format has no strides: an array that is not row-major must be copied first.
                shard[name] = np.ascontiguousarray(array)
                bar.update(sizes[name])
            if is_first_process():
                _write_shard(shard, folder / file)
            weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1 and is_first_process():
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index)


def _shards(sizes: dict[str, int], max_bytes: int) -> Iterator[list[str]]:
    """Yields the names of each shard, in order; a name that would make its shard too large begins the next one."""
    shard: list[str] = []
    used = 0
    for name, size in sizes.items():
        if shard and used + size > max_bytes:
            yield shard
            shard, used = [], 0
        shard.append(name)
        used += size
    yield shard


def _write_shard(shard: dict[str, np.ndarray], file: Path) -> None:
    save_file(shard, file, metadata={"format": "pt"})  # transformers refuses files without this entry
