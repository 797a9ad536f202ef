"""Training: the loss, the optimizer, the step and the data; each can be used alone."""

from typing import TYPE_CHECKING

from moe_jax.runtime.lazy import export_lazily

if TYPE_CHECKING:
    from moe_jax.checkpoint.tokenizer import load_tokenizer
    from moe_jax.train.batch import put_batch
    from moe_jax.train.data import batches, open_documents
    from moe_jax.train.data.survey import Survey, survey
    from moe_jax.train.evaluate import make_evaluation
    from moe_jax.train.gradients import accumulate, accumulate_in_place, gradients_fn
    from moe_jax.train.loss import LossWeights, log_probs, log_probs_and_entropies, loss
    from moe_jax.train.model_of_run import model_of_run
    from moe_jax.train.objective import NextToken
    from moe_jax.train.on_devices import mean_over_devices, on_devices, sum_over_devices
    from moe_jax.train.optimizer import make_optimizer, warmup_cosine
    from moe_jax.train.state import TrainState, apply_gradients, init_state
    from moe_jax.train.step import make_train_step

__all__ = [
    "LossWeights", "NextToken", "Survey", "TrainState", "accumulate", "accumulate_in_place", "apply_gradients", "batches",
    "gradients_fn", "init_state", "load_tokenizer", "log_probs", "log_probs_and_entropies", "loss", "make_evaluation",
    "make_optimizer", "make_train_step", "mean_over_devices", "model_of_run", "on_devices", "open_documents", "put_batch",
    "sum_over_devices", "survey", "warmup_cosine",
]  # fmt: skip

export_lazily(__name__)
