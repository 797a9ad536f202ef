"""The commands of the program `moe-jax`, each a dataclass of which tyro makes the options."""
