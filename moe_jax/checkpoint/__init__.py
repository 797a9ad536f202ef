"""Checkpoints: Hugging Face folders in and out, model parameters as Orbax, and the training state."""
