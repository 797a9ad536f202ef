"""A model's parameters and config as an Orbax checkpoint: a folder with config.json, the tokenizer's files and `params/`.

In `params` each parameter has its path as name ("stages.0.self_attn.q_proj.weight"), stacked as the model holds it. Orbax
writes and reads shards in parallel from every process, so it is the faster format for big models that stay in JAX.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from orbax.checkpoint import v1 as ocp

from moe_jax.checkpoint.companions import Companions
from moe_jax.checkpoint.folders import replaced_folder
from moe_jax.checkpoint.training import lacks_memory, reason_of
from moe_jax.config import load_config
from moe_jax.models.auto import from_config
from moe_jax.models.decoder import Decoder
from moe_jax.parallel.layout import mesh_of, parameter_sharding
from moe_jax.parallel.mesh import refuse_pipe
from moe_jax.runtime.processes import is_first_process


def save_orbax(
    model: Decoder, folder: str | Path, *, tokenizer_from: str | Path | None = None, chat_template: str | None = None
) -> None:
    """Writes parameters, config and tokenizer files as an Orbax folder; arguments as in `save_pretrained`.

    Raises:
      FileExistsError: `folder` is a file, or has files and no config.json, so it is not a checkpoint that may be replaced.
      FileNotFoundError: `tokenizer_from` has no tokenizer files, or is neither a folder nor a model on the hub.
      ValueError: `folder` is a mount point, the current directory or holds it. Or the model is on a mesh with a pipe.
    """
    refuse_pipe(mesh_of(nnx.state(model, nnx.Param)), "save_orbax", "save_pretrained writes such a model")
    arrays = {_name(path): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model))}
    companions = Companions(model, tokenizer_from, chat_template)
    with replaced_folder(folder, companions.replaces) as target:
        ocp.save(target / "params", arrays)
        if is_first_process():
            companions.write(target)


def load_orbax(
    folder: str | Path, *, dtype: DTypeLike = jnp.bfloat16, param_dtype: DTypeLike | None = None, mesh: Mesh | None = None
) -> Decoder:
    """Loads a model that `save_orbax` wrote; arguments as in `hf_load.from_pretrained`.

    The mesh may differ from the mesh on which the model was saved.

    Raises:
      FileNotFoundError: there is no config.json or no `params` in `folder`.
      ValueError: the parameters in the folder do not fit its config; one error lists all differences. Or they cannot be
        read, or the mesh has a pipe.
    """
    refuse_pipe(mesh, "load_orbax", "from_pretrained reads onto such a mesh")
    folder = Path(folder).expanduser().resolve()
    config = load_config(folder)
    if not (folder / "params").is_dir():
        raise FileNotFoundError(f"no params/ in {folder}: it is not an Orbax checkpoint of a model")
    param_dtype = jnp.dtype(dtype if param_dtype is None else param_dtype)
    abstract = nnx.eval_shape(lambda: from_config(config, dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(0)))
    graph, parameters = nnx.split(abstract)
    leaves = list(nnx.to_flat_state(parameters))
    wanted = {
        _name(path): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=parameter_sharding(path, leaf.shape, mesh))
        for path, leaf in leaves
    }
    _check(folder, wanted)
    with _whole(folder):
        arrays = ocp.load(folder / "params", wanted)
    model = nnx.merge(graph, nnx.from_flat_state([(path, leaf.replace(arrays[_name(path)])) for path, leaf in leaves]))
    model.source = str(folder)
    return model


def stored_arrays(folder: Path) -> dict[str, Any]:
    """Returns the shape and dtype of each stored parameter by name, without reading any.

    Raises:
      ValueError: they cannot be read.
    """
    with _whole(folder):
        stored = ocp.metadata(folder / "params").metadata
        if stored is None:
            raise ValueError("its metadata are damaged")
        return stored


@contextmanager
def _whole(folder: Path) -> Iterator[None]:
    """Raises a ValueError that names the parameters' folder for any read error other than a lack of memory."""
    try:
        yield
    except Exception as error:
        if lacks_memory(error):
            raise
        raise ValueError(f"{folder / 'params'} cannot be read, it is truncated or corrupt ({reason_of(error)})") from error


def _check(folder: Path, wanted: dict[str, jax.ShapeDtypeStruct]) -> None:
    """Raises ValueError if the stored names and shapes differ from the wanted names and shapes."""
    stored = {name: tuple(leaf.shape) for name, leaf in stored_arrays(folder).items()}
    problems = [f"{name}: missing" for name in wanted if name not in stored]
    problems += [f"{name}: unexpected" for name in stored if name not in wanted]
    problems += [
        f"{name}: shape {list(shape)}, expected {list(wanted[name].shape)}"
        for name, shape in stored.items()
        if name in wanted and shape != wanted[name].shape
    ]
    if problems:
        raise ValueError(f"the parameters in {folder} do not match its config: " + "; ".join(problems))


def _name(path: tuple) -> str:
    return ".".join(str(part) for part in path)
