"""What every test runs under."""

import gc
import os
import shutil
import tempfile

# JAX's GPU interpreter waits for barriers inside callbacks, which hold a thread of XLA's CPU pool each: six in a kernel of two
# blocks. With a pool of two, as a machine of two cores has, the warpgroup that they wait for may never run.
os.environ.setdefault("NPROC", "16")

import cpu_flags
import seeds

if os.environ.get("JAX_PLATFORMS") == "cpu":
    os.environ.setdefault("XLA_FLAGS", cpu_flags.UNOPTIMISED)

import hypothesis
import jax
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

# Tests compare f32 with f32 and f64; on an NVIDIA GPU XLA multiplies f32 matrices in TF32 unless told otherwise.
jax.config.update("jax_default_matmul_precision", "highest")

hypothesis.settings.register_profile("moe_jax", print_blob=True)
hypothesis.settings.load_profile("moe_jax")

COMPILED = "JAX_COMPILATION_CACHE_DIR"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """What several tests compile, or several processes of a test, is compiled once in this run on CPUs."""
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = seeds.SEED
    starts_workers = getattr(config.option, "numprocesses", None)
    on_cpu = os.environ.get("JAX_PLATFORMS") == "cpu"
    if on_cpu and COMPILED not in os.environ and not starts_workers:
        # Of this worker alone: JAX does not guard a file that one process writes from another that reads it.
        folder = tempfile.mkdtemp(prefix="moe_jax-compiled-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        os.environ |= {COMPILED: folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def pytest_collection_modifyitems(items):
    """Those that take longest begin first, so that none of them runs on alone at the end."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(autouse=True, scope="module")
def kept_objects_are_searched_once():
    """What JAX's caches keep of a module's tests, gigabytes late in a run, is not searched for garbage after them."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_races():
    """The race detector of JAX's GPU interpreter found nothing in the kernels that a test ran."""
    gpu_callbacks.reset_gpu_interpret_mode_state()
    yield
    if gpu_callbacks._races is not None:
        assert not gpu_callbacks.get_races().races_found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """A failure says how to repeat its random numbers."""
    report = yield
    if report.failed:
        report.sections.append(("seed", f"Repeat with: MOE_JAX_SEED={seeds.SEED} pytest '{item.nodeid}'"))
    return report


@pytest.fixture
def rng():
    """Random numbers of this test; see `seeds`."""
    return seeds.rng()
