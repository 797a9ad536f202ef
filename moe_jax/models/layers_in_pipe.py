"""Places of a model's layers: the stage that a pipeline deals out to its ranks, and the layers of each stack."""

import itertools

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


def stack_of(path: tuple) -> tuple:
    """Returns the path of the stacked layers, a stage or a place in its body, that the parameter at `path` belongs to."""
    return path[:4] if path[2] == "places" else path[:2]


def layers_of_stacks(lengths: dict[tuple, int]) -> dict[tuple, slice]:
    """Returns the places of each stack's layers among the layers of all stacks, in the order in which tokens pass them.

    Args:
      lengths: the number of layers of each stack, by `stack_of`. The stacks of a stage take turns.
    """
    found: dict[tuple, slice] = {}
    first = 0
    for _, group in itertools.groupby(sorted(lengths), lambda stack: stack[1]):
        stacks = list(group)
        end = first + sum(lengths[stack] for stack in stacks)
        found |= {stack: slice(first + place, end, len(stacks)) for place, stack in enumerate(stacks)}
        first = end
    return found
