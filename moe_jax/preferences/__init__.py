"""Preferences: trains a model to prefer the better of two answers (DPO, IPO, ORPO, SimPO), or desirable answers (KTO).

objective = preferences.Preference(preferences.PreferenceSettings("dpo", beta=0.1))
step = train.make_train_step(nnx.graphdef(model), optimizer, objective)
"""

from typing import TYPE_CHECKING

from moe_jax.runtime.lazy import export_lazily

if TYPE_CHECKING:
    from moe_jax.preferences.batches import PreferenceBatches, preference_batches
    from moe_jax.preferences.documents import Preferences, open_preferences
    from moe_jax.preferences.losses import Pair, dpo_loss, hinge_loss, ipo_loss, kto_baseline, kto_loss, orpo_loss, simpo_loss
    from moe_jax.preferences.objective import AnswerSums, Preference, answer_sums, reference_log_probs, reference_table
    from moe_jax.preferences.settings import PreferenceSettings

__all__ = [
    "AnswerSums", "Pair", "Preference", "PreferenceBatches", "PreferenceSettings", "Preferences", "answer_sums", "dpo_loss",
    "hinge_loss", "ipo_loss", "kto_baseline", "kto_loss", "open_preferences", "orpo_loss", "preference_batches",
    "reference_log_probs", "reference_table", "simpo_loss",
]  # fmt: skip

export_lazily(__name__)
