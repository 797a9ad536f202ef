"""The interpreter's shims, which a GPU does not need, and the race detector."""

import contextlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental import pallas as pl

from moe_jax.kernels.backends import compute_capability
from moe_jax.kernels.hopper.interpreter import interpret, is_interpreted, operand_staging
from moe_jax.kernels.hopper.launch import _warn_of_slow_jax, grid_size, launch
from tests.helpers import races
from tests.helpers.lowered import H200

needs_interpreter = pytest.mark.skipif(not is_interpreted(), reason="the kernels run on this GPU")


@jax.jit
def ones_by_each(wanted):
    """Ones [2, 128]. With wanted = [1], thread block i writes row i. With [0], both write row 0, and row 1 is undefined."""

    def body(wanted_ref, out_ref):
        block = lax.axis_index("block")

        # In each block another warpgroup writes.
        @pl.when(lax.axis_index("warpgroup") == block)
        def _():
            out_ref[block * wanted_ref[0]] = jnp.ones(128, jnp.float32)

    return launch("ones", body, [jax.ShapeDtypeStruct((2, 128), jnp.float32)], [], warpgroups=2)(wanted)[0]


RACE_FREE, RACING = jnp.ones(1, jnp.int32), jnp.zeros(1, jnp.int32)


@needs_interpreter
@pytest.mark.parametrize("runs, found", [([RACING, RACE_FREE], [True, False]), ([RACE_FREE, RACING], [False, True])])
def test_race_is_found(runs, found):
    """In any of the kernels that run, not in the last alone."""
    with races.search() as searches:
        for wanted in runs:
            ones_by_each(wanted)
    assert [each.races_found for each in searches] == found
    with pytest.raises(AssertionError, match="the accesses that race"):
        races.assert_none(searches)


@needs_interpreter
@pytest.mark.parametrize("searches_first", [False, True])
def test_caches_of_jit(searches_first):
    """A kernel that was traced without the detector is traced again with it, and the other way round."""
    run = jax.jit(lambda wanted: ones_by_each(wanted))

    def is_searched(searches):
        with races.search() if searches else contextlib.nullcontext():
            jax.block_until_ready(run(RACE_FREE))
        return any(gpu_callbacks.get_races().writes.values())

    jax.clear_caches()
    for searches in (searches_first, not searches_first, searches_first):
        assert is_searched(searches) == searches


@needs_interpreter
def test_search_of_nothing():
    """Neither a test that ran no kernel nor one that ran it without the detector has shown anything."""
    with pytest.raises(AssertionError, match="no kernel ran"), races.search() as searches:
        races.assert_none(searches)
    with pytest.raises(AssertionError, match="without the race detector"):
        races.assert_none([SimpleNamespace(reads={}, writes={}, races_found=False)])


def test_an_h200_is_not_interpreted():
    """Also where the program is lowered on a machine without a GPU."""
    with jax.sharding.use_abstract_mesh(H200):
        assert not is_interpreted() and interpret() is False
        assert operand_staging((64, 64), jnp.dtype(jnp.bfloat16)) is None
        assert (compute_capability(), grid_size(), grid_size(1)) == ("9.0", 264, 132)


@pytest.mark.parametrize("version, warns", [("0.11.2", False), ("0.12.0.1", True)])
def test_a_jax_that_spills_is_named(monkeypatch, caplog, version, warns):
    """Once, and where kernels are compiled for a GPU."""
    monkeypatch.setattr(jax, "__version__", version)
    _warn_of_slow_jax.cache_clear()
    with jax.sharding.use_abstract_mesh(H200):
        for _ in range(2):
            launch("nothing", lambda: None, [], [], warpgroups=1)
    assert [f"jax {version} makes most Hopper kernels" in message for message in caplog.messages] == [True] * warns
