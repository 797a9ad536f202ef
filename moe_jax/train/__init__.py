"""Training: the loss, the optimizer, the step, the data, and the loop that ties them; each usable alone."""

from typing import TYPE_CHECKING

from moe_jax.runtime.lazy import export_lazily

if TYPE_CHECKING:
    from moe_jax.checkpoint.tokenizer import load_tokenizer
    from moe_jax.train.data import batches, open_documents
    from moe_jax.train.data.survey import Survey, survey
    from moe_jax.train.evaluate import make_evaluation
    from moe_jax.train.log_probs import log_probs
    from moe_jax.train.loss import loss
    from moe_jax.train.model_of_run import model_of_run
    from moe_jax.train.optimizer import make_optimizer, warmup_cosine
    from moe_jax.train.step import TrainState, init_state, make_train_step, put_batch

__all__ = [
    "Survey",
    "TrainState",
    "batches",
    "init_state",
    "load_tokenizer",
    "log_probs",
    "loss",
    "make_evaluation",
    "make_optimizer",
    "make_train_step",
    "model_of_run",
    "open_documents",
    "put_batch",
    "survey",
    "warmup_cosine",
]

export_lazily(__name__)
