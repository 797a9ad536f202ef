"""Triton kernels where there is no GPU: run by Triton's interpreter, or compiled by the assembler that Triton brings."""

import importlib
import importlib.metadata
import importlib.util
import math
import os
import re
import subprocess
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.kernels import backends
from moe_jax.kernels.experts import triton as ours
from moe_jax.kernels.experts.triton import launch

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the package triton")


def pretend_hopper(monkeypatch, capability="9.0"):
    monkeypatch.setattr(backends, "compute_capability", lambda: capability)
    for module in (ours, launch):
        monkeypatch.setattr(module, "missing_packages", lambda: None)


def interpret_from_now_on():
    """Begins the interpreter's process: Triton decides at its import whether kernels are interpreted."""
    os.environ["TRITON_INTERPRET"] = "1"


def interpreted_call(executor, *inputs, kernel, out_shape, grid, input_output_aliases=None, **options):
    constants = {name: value for name, value in options.items() if name in kernel.arg_names}
    arrays = [a for a in inputs if not isinstance(a, int)]

    def run(*arrays):
        left = iter(arrays)
        values = [a if isinstance(a, int) else np.asarray(next(left)) for a in inputs]
        outputs = [(o.shape, o.dtype.name) for o in out_shape]
        return executor.submit(
            run_in_interpreter, kernel.__module__, kernel.__name__, values, outputs, grid, constants, input_output_aliases or {}
        ).result()

    return jax.pure_callback(run, out_shape, *arrays)


def run_in_interpreter(module, name, inputs, outputs, grid, constants, aliases):
    """Runs in the interpreter's process. Rows that a kernel leaves unwritten are NaN.

    The interpreter multiplies the bits of bfloat16 as if they were whole numbers and rounds to it by cutting off: it gets f32.
    """
    import torch

    mend_e4m3()

    def wide(dtype):
        return "float32" if dtype == "bfloat16" else dtype

    def tensor(a):
        if a.dtype.name == "float8_e4m3fn":
            return torch.tensor(a.view(np.uint8)).view(torch.float8_e4m3fn)
        return torch.tensor(a.astype(wide(a.dtype.name)))

    arguments = [a if isinstance(a, int) else tensor(a) for a in inputs]
    results = [torch.full(shape, math.nan).to(getattr(torch, wide(dtype))) for shape, dtype in outputs]
    for number, output in aliases.items():
        results[output] = arguments[number]
    getattr(importlib.import_module(module), name)[grid](*arguments, *results, **constants)
    found = [result.view(torch.uint8) if result.dtype == torch.float8_e4m3fn else result for result in results]
    return [
        a.numpy().view(dtype) if dtype == "float8_e4m3fn" else a.numpy().astype(dtype)
        for a, (_, dtype) in zip(found, outputs, strict=True)
    ]


def mend_e4m3():
    """Mends the interpreter's e4m3: it rounds by one bit alone, drops a carry, and multiplies NaN as 480."""
    import ml_dtypes
    import triton.language as tl
    from triton.runtime import interpreter

    e4m3 = ml_dtypes.float8_e4m3fn

    class Mended(interpreter.InterpreterBuilder):
        def create_fp_to_fp(self, source, dtype, mode):
            if dtype.scalar != tl.float8e4nv or source.dtype.scalar != tl.float32:
                return super().create_fp_to_fp(source, dtype, mode)
            return interpreter.TensorHandle(source.data.astype(e4m3).view(np.uint8), dtype.scalar)

        def create_dot(self, a, b, start, *options):
            if a.dtype.scalar != tl.float8e4nv:
                return super().create_dot(a, b, start, *options)
            product = np.matmul(*(operand.data.view(e4m3).astype(np.float32) for operand in (a, b)))
            return interpreter.TensorHandle(product + start.data, start.dtype.scalar)

    interpreter.interpreter_builder.__class__ = Mended


class RecordedCall(NamedTuple):
    """A kernel's arguments, inputs before outputs, and its options."""

    arguments: tuple
    options: dict


def recorded_calls(monkeypatch):
    """Lets kernels give zeros, and returns the list to which each adds its call."""
    calls = []

    def record(*inputs, out_shape, input_output_aliases=None, **options):
        calls.append(RecordedCall((*inputs, *out_shape), options))
        return [jnp.zeros(o.shape, o.dtype) for o in out_shape]

    monkeypatch.setattr(launch, "triton_call", lambda: record)
    return calls


def compiled_without_spills(call, capability, folder):
    """Returns the PTX of a recorded call; no GPU is needed.

    Asserts that it spills no registers and fits in shared memory.
    """
    compiler = importlib.import_module("triton.compiler")
    gpu = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", int(capability.replace(".", "")), 32)
    tools = os.path.join(os.path.dirname(importlib.import_module("triton").__file__), "backends", "nvidia", "bin")
    names = {"bfloat16": "*bf16", "float32": "*fp32", "int32": "*i32", "float8_e4m3fn": "*fp8e4nv"}
    kernel = call.options["kernel"]
    constants = {name: value for name, value in call.options.items() if name in kernel.arg_names}
    types = ["i32" if isinstance(a, int) else names[a.dtype.name] for a in call.arguments]
    signature = dict(zip(kernel.arg_names, types, strict=False)) | dict.fromkeys(constants, "constexpr")
    attributes = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types) if kind[0] == "*"}
    compiled = compiler.compile(
        compiler.ASTSource(kernel, signature, constexprs=constants, attrs=attributes),
        target=gpu,
        options={"enable_fp_fusion": True} | {name: call.options[name] for name in ("num_warps", "num_stages")},
    )
    (folder / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    dump = [os.path.join(tools, "cuobjdump"), "--dump-resource-usage", str(folder / "kernel.cubin")]
    usage = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    assert re.search(r"STACK:0\b.* LOCAL:0\b", usage), f"{kernel.__name__}: {usage}"
    shared_bytes = {"8.0": 163, "8.9": 99}.get(capability, 227) * 1024
    assert compiled.metadata.shared <= shared_bytes, kernel.__name__
    return compiled.asm["ptx"]
