"""Searches the kernels that a test runs in JAX's GPU interpreter for races."""

import contextlib
from unittest import mock

import jax
from jax._src import core
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

# JAX 0.11 has no such option and always warns. From 0.12 on, the first race ends the kernel unless told otherwise.
WARNS = {"on_race": "warn"} if hasattr(plgpu.InterpretGPUParams, "on_race") else {}


@contextlib.contextmanager
def search():
    """Yields a list that gets one search of each kernel that runs: its `reads`, its `writes`, and `races_found`.

    The mode is part of the key of jit's caches. A kernel that was traced without the detector is traced again, and what is
    traced here serves no other test. JAX itself keeps the search of the last kernel alone.
    """
    searches: list = []
    one_search = gpu_callbacks.GPURaceDetectionState

    def listed(**options):
        searches.append(one_search(**options))
        return searches[-1]

    gpu_callbacks.reset_gpu_interpret_mode_state()
    with (
        mock.patch.object(gpu_callbacks, "GPURaceDetectionState", listed),
        plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True, **WARNS)),
    ):
        yield searches
        # A kernel whose result nobody has read may still be running.
        jax.effects_barrier()


def assert_none(searches) -> None:
    """A kernel ran, the detector saw what each of them reads or writes, and found no race."""
    assert searches, "no kernel ran in the interpreter"
    for each in searches:
        assert any(each.reads.values()) or any(each.writes.values()), "a kernel ran without the race detector"
    assert not any(each.races_found for each in searches), "JAX has printed the accesses that race"


def kernels_of(f, *arguments) -> set[str]:
    """Returns the names of the kernels that f launches."""

    def names(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "mpmd_map":
                yield equation.params["name"]
            else:
                for inner in core.jaxprs_in_params(equation.params):
                    yield from names(inner)

    return set(names(jax.make_jaxpr(f)(*arguments).jaxpr))
