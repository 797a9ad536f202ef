"""Facts about a lowered program, read from its text."""

import re

import jax
from jax._src import core
from jax._src.interpreters import partial_eval
from jax.sharding import AbstractDevice, AbstractMesh

H200 = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu"))


def lowered_for_h200(f, *arguments) -> str:
    """f's program for one H200. Layouts, alignment and shared memory are checked while lowering; no GPU is needed."""
    with jax.sharding.use_abstract_mesh(H200):
        return jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def traced_for_h200(f, *arguments) -> core.Jaxpr:
    """Returns f's program for one H200 as JAX traces it, without what nothing reads. Lowering its kernels takes seconds."""
    with jax.sharding.use_abstract_mesh(H200):
        jaxpr = jax.jit(f).trace(*arguments).jaxpr.jaxpr
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


def launches_on_h200(f, *arguments) -> list[core.JaxprEqn]:
    """Returns f's launches of Hopper kernels on one H200; one in a loop counts once. Their results are `outvars`."""

    def launches(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "mpmd_map":
                yield equation
            else:
                for inner in core.jaxprs_in_params(equation.params):
                    yield from launches(inner)

    return list(launches(traced_for_h200(f, *arguments)))


def num_kernels(text: str) -> int:
    """Returns the number of Hopper kernels that a program launches: in each call of a function, and once in a loop."""
    functions = dict(re.findall(r"func\.func \w+ @([\w.]+)\((.*?)\n  }\n", text, re.DOTALL))

    def launches(body: str) -> int:
        called = re.findall(r"\bcall @([\w.]+)\(", body)
        return body.count("custom_call @mosaic_gpu") + sum(launches(functions[name]) for name in called)

    return launches(functions["main"])
