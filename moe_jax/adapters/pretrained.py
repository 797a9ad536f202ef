"""Loads a checkpoint, with an adapter beside its weights if one is given."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from moe_jax.adapters.load import load_adapter
from moe_jax.adapters.source import source_of
from moe_jax.checkpoint import hf_load
from moe_jax.checkpoint.weights import Weights
from moe_jax.models.decoder import Decoder


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
    """Loads a checkpoint of any architecture of `moe_jax.models`; one in FP8 or GPTQ is dequantised on the way.

    Args:
      folder_or_hub_id: a folder with config.json and weights, or a hub id such as "Qwen/Qwen3-30B-A3B", which is downloaded.
        Or the output folder of a run, which holds a model, or an adapter that names its weights; or an adapter's folder.
      adapter: a folder or hub id of an adapter (LoRA) to put beside the weights, as `adapters.load_adapter` does. All weights
        are frozen then. `adapters.merge_adapter` adds it to them.
      dtype: the dtype in which the model computes.
      param_dtype: the dtype of the parameters, whatever the files hold (default: dtype). float32 for training. A bias that no
        gradient reaches (`layers.router.ExpertBias`) is always float32.
      mesh: the devices to spread the parameters over (`moe_jax.parallel.make_mesh`); None: the default device.
      pipe_chunks: with several devices along `pipe`, the chunks of layers of each rank, as in `parallel.Parallelism`. Layers go
        to their ranks alone, stacked as by `parallel.pipeline.chunks.to_chunks`. Such a model can be trained and saved.
      mtp: True loads the modules that predict further tokens, if the checkpoint has some (`models.mtp`; 11.6e9 parameters in
        DeepSeek-V3). False leaves more memory for inference; a checkpoint written from the model then lacks them. No adapter
        can be put beside them: with an adapter they are left out.
      weights: "as stored" keeps matrices that the files have in FP8 or GPTQ (`checkpoint.quantised`) as they are.
        "nf4" makes 4 bits of the experts' matrices (`layers.quantised`), "fp8" makes FP8 of them. A layer is whole where it is
        computed, except experts in FP8 after `model.set_precision("fp8")`. All parameters are frozen (`layers.lora.Frozen`):
        such a model computes, and on one device trains adapters (`adapters.add_lora`). On a mesh quantised experts are split
        along their own axis, and other quantised matrices are whole on each device.
      progress: show a progress bar when stderr is a terminal.

    Raises:
      FileNotFoundError: there is no such folder and no such model on the hub, or the folder of an adapter lacks a file.
      ValueError: dtype or param_dtype is no float dtype, or config.json asks for an unsupported feature. Or the layers cannot
        lie in the mesh's pipe: layers with experts stand before dense ones, or layers are too few for its chunks. Or the
        adapter does not fit the model, or `weights` is not for this checkpoint or mesh.
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
