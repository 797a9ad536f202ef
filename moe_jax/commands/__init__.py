"""The commands of the program `moe-jax`: each is a dataclass, whose fields tyro turns into options."""
