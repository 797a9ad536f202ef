"""The identity of a run: compares the checkpoints in an output folder with the run that is asked for."""

import logging
from pathlib import Path
from typing import Any

from moe_jax.runtime.processes import is_first_process
from moe_jax.train.starting_weights import MODEL, same_weights

_logger = logging.getLogger(__name__)


def same_run(saved: dict[str, Any], current: dict[str, Any], output: Path) -> dict[str, Any]:
    """Returns the identity that the run in `output` continues with.

    Starting weights are compared if the run noted them in the same way. That is a hash of a checkpoint's weights, or values of
    a model passed from Python. Otherwise the run continues with what it noted, if anything, and a warning.

    Raises:
      ValueError: the folder holds another run; the message names what differs.
    """
    kept = {name: value for name, value in current.items() if name != MODEL}
    # Through JSON, as it was saved: tuples are lists there.
    different = [
        f"{name}: checkpoint {saved.get(name)!r}, now {value!r}" for name, value in kept.items() if saved.get(name) != value
    ]
    noted, asked = saved.get(MODEL), current[MODEL]
    if type(noted) is not type(asked):
        if is_first_process():
            how = "did not note its starting weights" if noted is None else "noted its starting weights in another way"
            _logger.warning("the run in %s %s, so nothing tells whether `model` is the one that it began with", output, how)
    elif not same_weights(noted, asked):
        different.append("model: its weights are not those that the run began with")
    if different:
        raise ValueError(f"{output} holds another run; choose another output folder. Different: " + "; ".join(different))
    return kept if noted is None else kept | {MODEL: noted}
