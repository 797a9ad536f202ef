"""The data of a run: what it learns from, the text held out from it, and a survey of both before weights are read."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moe_jax.parallel.parallelism import Parallelism
from moe_jax.recipes.finetuning.settings import FinetuneSettings
from moe_jax.recipes.run.folder import noted_steps
from moe_jax.runtime.processes import is_first_process
from moe_jax.train.data import Batches, Documents, batches, open_documents
from moe_jax.train.data.survey import Survey, survey

_logger = logging.getLogger(__name__)


class HeldOut(NamedTuple):
    """Text that is not trained on: its batches, a micro-batch's rows each, and its documents; none without `eval_data`."""

    batches: list[dict[str, np.ndarray]]
    documents: Documents | None

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of the documents."""
        return None if self.documents is None else self.documents.fingerprint


class RunData(NamedTuple):
    """The documents of a run, and those that its loss is measured on; None without `eval_data`."""

    documents: Documents
    held_out: Documents | None


def open_data(settings: FinetuneSettings) -> RunData:
    """Opens the data of a run, and the held-out data.

    Raises:
      ValueError, FileNotFoundError, ImportError: as `open_documents`. Or held-out text is trained on or of another format.
    """
    documents = _opened(settings, settings.data)
    if settings.eval_data is None:
        return RunData(documents, None)
    held_out = _opened(settings, settings.eval_data)
    _check_held_out(held_out, documents, settings)
    if held_out.bad and is_first_process():
        _logger.warning("left out of the held-out data: %s", held_out.bad)
    return RunData(documents, held_out)


def with_survey(
    settings: FinetuneSettings, documents: Documents, tokenizer: Any, begin_texts: bool, *, resumed: bool
) -> tuple[FinetuneSettings, Survey | None]:
    """Returns the settings with `epochs` turned into `steps`, and the survey of the data if one was made.

    Raises:
      ValueError: `epochs` of a stream.
    """
    options: dict[str, Any] = dict(seq_len=settings.seq_len, seed=settings.seed, begin_texts=begin_texts)
    options |= dict(skip_bad=settings.skip_bad_documents)
    if documents.is_stream and settings.epochs is not None:
        raise ValueError(
            f"epochs={settings.epochs} needs the number of documents, which a stream does not tell: give steps, or take=N in "
            "place of stream=true"
        )
    if settings.epochs is None:
        begins_here = is_first_process() and not resumed
        return settings, survey(documents, tokenizer, **options) if begins_here else None
    steps, found = noted_steps(Path(settings.output).expanduser(), settings.epochs) if resumed else None, None
    if steps is None:
        # All documents are measured: the number of steps must be the same each time, and in each process.
        found = survey(documents, tokenizer, **options, max_documents=None, max_seconds=None)
        steps = found.steps(settings.epochs, settings.batch_size)
    return replace(settings, steps=steps, epochs=None), found


def run_batches(
    documents: Documents,
    tokenizer: Any,
    settings: FinetuneSettings,
    rows: int,
    parallelism: Parallelism | None,
    begin_texts: bool,
) -> Batches:
    """Returns a stream of batches of `rows` rows; each process makes the rows of its own devices."""
    return batches(
        documents,
        tokenizer,
        seq_len=settings.seq_len,
        batch_size=rows,
        seed=settings.seed,
        rows=None if parallelism is None else parallelism.own_rows(rows),
        begin_texts=begin_texts,
        skip_bad=settings.skip_bad_documents,
    )


def held_out_batches(
    documents: Documents | None,
    tokenizer: Any,
    settings: FinetuneSettings,
    parallelism: Parallelism | None,
    begin_texts: bool,
) -> HeldOut:
    """Returns `eval_batches` batches of the held-out documents, which are drawn by the seed; none without documents."""
    if documents is None:
        return HeldOut([], None)
    rows = settings.batch_size // settings.gradient_accumulation
    stream = run_batches(documents, tokenizer, settings, rows, parallelism, begin_texts)
    try:
        return HeldOut([next(stream) for _ in range(settings.eval_batches)], documents)
    finally:
        stream.close()


def try_first_batch(stream: Batches) -> None:
    """Makes the first batch, to raise what its documents raise, and rewinds."""
    begin = stream.get_state()
    next(stream)
    stream.set_state(begin)


def _opened(settings: FinetuneSettings, data: str | tuple[str, ...]) -> Documents:
    return open_documents(
        data,
        settings.data_format,
        learned_answers=settings.learned_answers,
        empty_thinking=settings.empty_thinking,
        skip_bad=settings.skip_bad_documents,
    )


def _check_held_out(held_out: Documents, documents: Documents, settings: FinetuneSettings) -> None:
    """Refuses held-out text of another format than the data, and text that is trained on: its loss would say nothing."""
    if held_out.format != documents.format and documents.format != "mixed":
        raise ValueError(
            f"eval_data={settings.eval_data!r} has the format {held_out.format}, and data={settings.data!r} "
            f"{documents.format}: their losses could not be compared; take one format"
        )
    both = _names(documents) & _names(held_out)
    if both or held_out.fingerprint == documents.fingerprint:
        raise ValueError(
            f"eval_data={settings.eval_data!r} must not be trained on, but data={settings.data!r} has "
            + (f"{min(both)} too" if both else "the same contents")
        )


def _names(documents: Documents) -> set[str]:
    """Returns the files, and the splits of the hub, that documents come from."""
    return {reader.name if reader.path is None else str(reader.path.resolve()) for reader in documents.readers}
