"""The layers of a model that a pipeline deals out to its ranks."""

from moe_jax.config import ModelConfig
from moe_jax.parallel.pipeline.chunks import LayersInPipe, PipeShape, check_layers


def layers_in_pipe(config: ModelConfig, pipe: PipeShape) -> LayersInPipe:
    """Returns the last stage before modules that predict further tokens: its repeats of a body of layers.

    Raises:
      ValueError: `pipe` has several ranks, and layers with experts stand before those; or a chunk of a rank has no layer.
    """
    *before, last = config.stages
    if pipe.ranks > 1 and any(stage.sparse for stage in before):
        raise ValueError(
            "a pipeline deals out a model's last layers of one kind, with dense layers alone before them; this model has "
            f"{len(config.stages)} runs of layers, and experts before the last"
        )
    check_layers(last.repeats, pipe)
    return LayersInPipe(len(before), last.repeats)
