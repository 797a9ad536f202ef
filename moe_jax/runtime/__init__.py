"""Processes, environment settings and lazy imports: all that is fixed before JAX starts."""
