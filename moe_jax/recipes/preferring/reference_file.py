"""The log-probabilities of the model that a run began with, kept in a file of its folder."""

import os
from pathlib import Path

import numpy as np
from tqdm import tqdm

from moe_jax.models.decoder import Decoder
from moe_jax.preferences.documents import Preferences
from moe_jax.preferences.reference import reference_table
from moe_jax.recipes.preferring.prepare import PlannedPreferences

REFERENCE = "reference_{}.npy"
"""The name of the file, of "data" and "eval_data"."""


def table_of_reference(plan: PlannedPreferences, data: Preferences | None, model: Decoder, name: str) -> np.ndarray | None:
    """Returns the reference's log-probabilities of the data, kept in a file of the run; None where they are not needed."""
    settings = plan.settings
    if data is None or settings.lora is not None or not settings.preference.needs_reference:
        return None
    file = Path(settings.output).expanduser() / REFERENCE.format(name)
    if not file.exists():
        with tqdm(total=len(data), desc="log-probabilities of the reference", unit="example") as progress:
            table = reference_table(
                model, plan.batches(data, in_order=True), lambda done, _: progress.update(done - progress.n)
            )
        unfinished = file.with_name(f".{file.name}.incomplete.npy")
        np.save(unfinished, table)
        os.replace(unfinished, file)
    return np.load(file)
