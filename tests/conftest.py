"""What every test runs under."""

import atexit
import gc
import logging
import os
import sys
from pathlib import Path

# JAX's GPU interpreter waits for barriers inside callbacks, which hold a thread of XLA's CPU pool each: six in a kernel of two
# blocks. With a pool of two, as a machine of two cores has, the warpgroup that they wait for may never run. In a collective of
# eight CPU devices each device holds a thread too.
os.environ.setdefault("NPROC", "16")

# The interpreter multiplies tiles with NumPy, whose OpenBLAS reads this when it is first imported. Its kernels for AVX2 sum a
# tile's last rows in another order: there, the bits of strict kernels would depend on a row's place.
os.environ.setdefault("OPENBLAS_CORETYPE", "Nehalem")

from tests.helpers import cpu_flags, garbage, seeds

# Worker processes find the flags in their environment.
if cpu_flags.is_for_eight_devices(sys.argv[1:]):
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": cpu_flags.of_devices(8)}
elif os.environ.get("JAX_PLATFORMS") == "cpu":
    os.environ.setdefault("XLA_FLAGS", cpu_flags.UNOPTIMISED)

import hypothesis
import jax
import pytest

from tests.helpers import compilation_cache, durations, interpreter_callbacks, races, shapes

# Before a test imports the package.
shapes.install()
if os.environ.get("JAX_PLATFORMS") == "cpu":
    interpreter_callbacks.install()

# Tests compare f32 with f32 and f64; on an NVIDIA GPU XLA multiplies f32 matrices in TF32 unless told otherwise.
jax.config.update("jax_default_matmul_precision", "highest")

# To note which lines of Python an operation comes from takes a twentieth of the time of tracing and compiling.
jax.config.update("jax_include_full_tracebacks_in_locations", False)
jax.config.update("jax_traceback_in_locations_limit", 0)

hypothesis.settings.register_profile("moe_jax", print_blob=True)
hypothesis.settings.load_profile("moe_jax")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """One seed for the run and for Hypothesis, programs compiled once, times recorded."""
    config.pluginmanager.register(durations)
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = seeds.SEED
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if os.environ.get("JAX_PLATFORMS") == "cpu" and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        workers = getattr(config.option, "numprocesses", None) or 0
        if not worker:
            compilation_cache.prepare(config)
        if worker or not workers:
            compilation_cache.use()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop():
    """Imports and collection are over."""
    garbage.search_rarely()


def pytest_collection_modifyitems(items):
    """Those that take longest begin first, so that none of them runs on alone at the end."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """A failure prints how to repeat its random numbers."""
    report = yield
    if report.failed:
        report.sections.append(("seed", f"Repeat with: MOE_JAX_SEED={seeds.SEED} pytest '{item.nodeid}'"))
    return report


@pytest.fixture(autouse=True, scope="module")
def kept_objects_are_searched_once():
    """What JAX's caches keep of a module's tests, gigabytes late in a run, is not searched for garbage after them."""
    yield
    if memory_maps() > MANY_MAPS:
        jax.clear_caches()
        gc.unfreeze()
    gc.collect()
    gc.freeze()


MANY_MAPS = 20_000
"""Each compiled program maps pieces of memory. At 65530 maps, the default limit of Linux, the next program ends the process."""


def memory_maps() -> int:
    """Returns the number of pieces of memory that this process maps; 0 where the system does not report it."""
    maps = Path("/proc/self/maps")
    return len(maps.read_bytes().splitlines()) if maps.exists() else 0


# Otherwise the bindings of Triton and JAX report every frozen object as a leak. pytest's own searches at its end come before.
atexit.register(gc.unfreeze)


@pytest.fixture(autouse=True)
def own_log_level():
    """A command that sets the level of the library's log does not set it for later tests."""
    yield
    logging.getLogger("moe_jax").setLevel(logging.NOTSET)


@pytest.fixture
def rng():
    """Random numbers of this test; see `seeds`."""
    return seeds.rng()


@pytest.fixture
def without_torch(monkeypatch):
    """Processes that the test starts find no torch, as on most machines: transformers would import it for a tokenizer."""
    paths = Path(__file__).parent / "helpers" / "torchless", os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))


@pytest.fixture
def no_races():
    """Searches the kernels that a test runs in the interpreter for races: at least one runs, and none has a race."""
    with races.search() as searches:
        yield
    races.assert_none(searches)
