"""Public names: each imported on first use, so that `import moe_jax` is quick, and no module in a function's place."""

import importlib
import inspect
import os
import subprocess
import sys

import pytest

PACKAGES = [
    *("", ".checkpoint", ".config", ".cost", ".generation", ".kernels", ".layers", ".models", ".parallel", ".parallel.expert"),
    *(".parallel.pipeline", ".train"),
]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_lists_the_names_it_exports(package):
    module = importlib.import_module(f"moe_jax{package}")
    assert dir(module) == sorted(module.__all__) == sorted(module._exports)
    modules = {name for name in dir(module) if inspect.ismodule(getattr(module, name))}
    # The top alone has packages among its names.
    assert modules == (set() if package else {name for name in dir(module) if hasattr(getattr(module, name), "__path__")})


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'moe_jax.train' has no attribute 'fit'"):
        importlib.import_module("moe_jax.train").fit  # noqa: B018


def test_a_function_is_not_hidden_by_the_submodule_of_its_name():
    code = """
import importlib, inspect
import moe_jax.kernels.attention as imported_first
import moe_jax
from moe_jax.kernels import attention as found
submodule = importlib.import_module("moe_jax.kernels.attention")
assert inspect.ismodule(submodule) and inspect.isfunction(found), (submodule, found)
assert moe_jax.kernels.attention is found is submodule.attention
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_moe_jax_imports_no_heavy_package():
    """Its configs and settings import none either."""
    heavy = ("jax", "flax", "grain", "orbax", "transformers", "matplotlib", "optax")
    code = f"""
import sys
import moe_jax, moe_jax.config, moe_jax.recipes.finetuning.settings
moe_jax.__version__, dir(moe_jax), dir(moe_jax.train)
print([name for name in {heavy} if name in sys.modules])
"""
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


def test_serving_on_a_cpu_imports_no_gpu_kernels_and_no_torch():
    """Each costs seconds before the first answer. A choice of backends must not import the kernels that it passes over."""
    heavy = ("jax.experimental.pallas.mosaic_gpu", "triton", "jax_triton", "torch", "matplotlib", "datasets", "orbax", "grain")
    code = f"""
import sys
import jax, jax.numpy as jnp
import moe_jax.serving.engine, moe_jax.serving.http.server, moe_jax.adapters.source
from moe_jax.kernels.attention.api import attention
from moe_jax.kernels.backends import resolve_backend
from moe_jax.kernels.top_k import top_k_indices
a, ids = jax.ShapeDtypeStruct((1, 4, 2, 64), jnp.bfloat16), jax.ShapeDtypeStruct((1, 4), jnp.int32)
jax.eval_shape(lambda a, ids: attention(a, a, a, scale=1.0, query_segment_ids=ids, key_segment_ids=ids), a, ids)
jax.eval_shape(lambda x: top_k_indices(x, 2), jax.ShapeDtypeStruct((1024, 64), jnp.float32))
print(resolve_backend(None, jnp.bfloat16, 128, 64), [name for name in {heavy} if name in sys.modules])
"""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment.pop("MOE_JAX_BACKEND", None)
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert run.stdout == "xla []\n"
