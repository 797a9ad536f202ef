"""Facts about a lowered program, read from its text."""

import re

import jax
from jax.sharding import AbstractDevice, AbstractMesh

H200 = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu"))


def lowered_for_h200(f, *arguments) -> str:
    """f's program for one H200. Layouts, alignment and shared memory are checked while lowering; no GPU is needed."""
    with jax.sharding.use_abstract_mesh(H200):
        return jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def num_kernels(text: str) -> int:
    """Returns the number of Hopper kernels that a program launches: in each call of a function, and once in a loop."""
    functions = dict(re.findall(r"func\.func \w+ @([\w.]+)\((.*?)\n  }\n", text, re.DOTALL))

    def launches(body: str) -> int:
        called = re.findall(r"\bcall @([\w.]+)\(", body)
        return body.count("custom_call @mosaic_gpu") + sum(launches(functions[name]) for name in called)

    return launches(functions["main"])
