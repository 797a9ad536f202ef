"""Flags of XLA for tests on CPUs."""

from pathlib import Path

UNOPTIMISED = " ".join(
    [
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        # The new emitters lower each fusion through MLIR, with a context and passes of its own: half the time of compiling.
        # JAX 0.12 has only these and ignores the option: a training step compiles in 5.9 CPU seconds there, in 2.3 with 0.11.2.
        "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
        # One module of LLVM a program, in place of up to 32, which threads would compile at once: a tenth less time of CPU.
        "--xla_cpu_parallel_codegen_split_count=1",
        # No instruction that multiplies and adds with one rounding: programs that fuse differently give the same bits.
        "--xla_cpu_max_isa=AVX",
    ]
)
"""Most programs of tests take longer to optimise than to run."""


def of_devices(count: int) -> str:
    """Returns the flags of a process with `count` CPU devices."""
    return f"{UNOPTIMISED} --xla_force_host_platform_device_count={count}"


def is_for_eight_devices(arguments: list[str]) -> bool:
    """Returns True if all files that a command line names are in `parallel/eight_devices`."""
    folder = Path(__file__).parents[1] / "parallel" / "eight_devices"
    paths = [Path(each.split("::")[0]).resolve() for each in arguments]
    return any(path.exists() for path in paths) and all(path.is_relative_to(folder) for path in paths if path.exists())
