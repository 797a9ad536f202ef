"""Checkpoints of a run whose layers were stacked for another pipeline than the one that goes on with them.

A checkpoint has the shapes that the run trained with. The entry PIPE of its position names the pipeline of these shapes.
"""

from collections.abc import Callable
from typing import Any

import jax

from moe_jax.parallel.pipeline.chunks import LayersInPipe, PipeShape
from moe_jax.parallel.pipeline.restack import restack, stacked_as
from moe_jax.train.state import TrainState

PIPE = "pipe"
"""The entry of a checkpoint's position for its `PipeShape`, as a JSON object; absent in runs that know no pipeline."""


def restored[Tree: Any](
    read: Callable[[Tree], Tree], like: Tree, layers: LayersInPipe, position: dict[str, Any], pipe: PipeShape
) -> Tree:
    """Returns arrays of a checkpoint in the shapes and layouts of `like`.

    Moments and low halves of masters move as their parameters do. If the checkpoint's layers are stacked otherwise, one array
    moves after the other, layer by layer. A device holds all layers of an array only if the new layout says so.

    Args:
      read: reads arrays of given shapes, dtypes and shardings from the checkpoint: `TrainingCheckpoints.restore` or
        `restore_parts`.
      like: arrays or ShapeDtypeStructs, such as a TrainState, with layers stacked for `pipe`.
      position: the checkpoint's.
    """
    saved = PipeShape(**position.get(PIPE, {}))
    if saved == pipe:
        return read(like)
    return restack(read(stacked_as(like, layers, saved)), like, layers.num_layers)


def freed(state: TrainState) -> TrainState:
    """Deletes the state's arrays; returns their shapes and shardings. A restored state of a large model needs the memory."""
    template = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    jax.tree.map(lambda x: x.delete(), state)
    return template
