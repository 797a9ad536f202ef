"""Positions of a model's layers: the stage that a pipeline splits over its ranks, and the layers of each stack."""

import itertools

from moe_jax.config import ModelConfig
from moe_jax.parallel.pipeline.chunks import LayersInPipe, PipeShape, check_layers


def layers_in_pipe(config: ModelConfig, pipe: PipeShape) -> LayersInPipe:
    """Returns the layers that pipeline parallelism splits over ranks: the last stage before MTP modules.

    Raises:
      ValueError: `pipe` has several ranks, and earlier stages have experts; or a chunk of a rank has no layer.
    """
    *before, last = config.stages
    if pipe.ranks > 1 and any(stage.sparse for stage in before):
        raise ValueError(
            "a pipeline deals out a model's last layers of one kind, with dense layers alone before them; this model has "
            f"{len(config.stages)} runs of layers, and experts before the last"
        )
    check_layers(last.repeats, pipe)
    return LayersInPipe(len(before), last.repeats)


def stack_of(path: tuple) -> tuple:
    """Returns the path prefix of the stacked layers that hold the parameter at `path`."""
    return path[:4] if path[2] == "places" else path[:2]


def layers_of_stacks(lengths: dict[tuple, int]) -> dict[tuple, slice]:
    """Returns the model-wide layer indices of each stack's layers, in order.

    Args:
      lengths: the number of layers of each stack, by `stack_of`. The stacks of a stage alternate.
    """
    found: dict[tuple, slice] = {}
    first = 0
    for _, group in itertools.groupby(sorted(lengths), lambda stack: stack[1]):
        stacks = list(group)
        end = first + sum(lengths[stack] for stack in stacks)
        found |= {stack: slice(first + place, end, len(stacks)) for place, stack in enumerate(stacks)}
        first = end
    return found
