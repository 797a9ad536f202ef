"""The log-probabilities of the model that a run began with, kept in a file of its folder."""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
from tqdm import tqdm

from moe_jax.models.decoder import Decoder
from moe_jax.preferences.answers import reference_table
from moe_jax.preferences.documents import Preferences
from moe_jax.recipes.preferring.prepare import PlannedPreferences
from moe_jax.recipes.run.identity import FP8_DENSE, PRECISION
from moe_jax.runtime.files import write_text
from moe_jax.train.starting_weights import MODEL

REFERENCE = "reference_{}.npy"
"""The name of the file, of "data" and "eval_data". A file beside it, whose name ends with .of, holds `_computed_of`."""

READ = ("plain_text", "seq_len", "max_length", "dtype", "param_dtype", PRECISION, FP8_DENSE, "preference", "config")
"""The entries of a run's identity that the log-probabilities follow from, beside the model, its tokenizer and the data."""


def table_of_reference(plan: PlannedPreferences, data: Preferences | None, model: Decoder, name: str) -> np.ndarray | None:
    """Returns the reference's log-probabilities of the data, kept in a file of the run; None where they are not needed.

    A file that was computed of other data or of another model is written anew.
    """
    settings = plan.settings
    if data is None or settings.lora is not None or not settings.preference.needs_reference:
        return None
    file = Path(settings.output).expanduser() / REFERENCE.format(name)
    note, computed_of = file.with_suffix(".of"), _computed_of(plan, data)
    if not (file.exists() and note.exists() and note.read_text() == computed_of):
        with tqdm(total=len(data), desc="log-probabilities of the reference", unit="example") as progress:
            table = reference_table(
                model, plan.batches(data, in_order=True), lambda done, _: progress.update(done - progress.n)
            )
        unfinished = file.with_name(f".{file.name}.incomplete.npy")
        np.save(unfinished, table)
        # Without the note a table counts as none. So a note never stands beside the table of another one.
        note.unlink(missing_ok=True)
        os.replace(unfinished, file)
        write_text(note, computed_of)
    return np.load(file)


def _computed_of(plan: PlannedPreferences, data: Preferences) -> str:
    """Returns a hash of all that the table follows from. The data that it is of may change while a run goes on."""
    read = {name: plan.identity[name] for name in (*READ, "tokenizer", MODEL)} | {"contents": data.fingerprint}
    return hashlib.blake2b(json.dumps(read, sort_keys=True).encode(), digest_size=16).hexdigest()
