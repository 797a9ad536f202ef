"""Flags of XLA for tests on CPUs."""

UNOPTIMISED = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""Most programs of tests take longer to optimise than to run."""


def of_devices(count: int) -> str:
    """For a process of its own with so many CPU devices."""
    return f"{UNOPTIMISED} --xla_force_host_platform_device_count={count}"
