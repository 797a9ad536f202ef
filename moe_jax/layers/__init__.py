"""Flax NNX modules that the models share; each takes and returns plain arrays."""
