"""Checkpoints: Hugging Face folders in and out, model parameters as Orbax, and the training state.

model = checkpoint.from_pretrained("Qwen/Qwen3-0.6B")
checkpoint.save_orbax(model, "orbax")           # the faster format for big models that stay in JAX
model = checkpoint.load_orbax("orbax", param_dtype="float32")
checkpoint.save_pretrained(model, "hf")         # back to a Hugging Face folder
"""

from typing import TYPE_CHECKING

from moe_jax.runtime.lazy import export_lazily

if TYPE_CHECKING:
    from moe_jax.checkpoint.hf_files import CheckpointError
    from moe_jax.checkpoint.hf_load import find_checkpoint, from_pretrained, read_config
    from moe_jax.checkpoint.hf_save import save_pretrained
    from moe_jax.checkpoint.orbax_params import load_orbax, save_orbax
    from moe_jax.checkpoint.stored import stored_dtype
    from moe_jax.checkpoint.tokenizer import load_tokenizer
    from moe_jax.checkpoint.training import TrainingCheckpoints

__all__ = [
    "CheckpointError", "TrainingCheckpoints", "find_checkpoint", "from_pretrained", "load_orbax", "load_tokenizer",
    "read_config", "save_orbax", "save_pretrained", "stored_dtype",
]  # fmt: skip

export_lazily(__name__)
