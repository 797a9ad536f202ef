"""Processes and settings that are fixed before JAX starts: launching, joining, lazy imports."""
