"""Compiles copies of a program that differ in an option of CUDA graphs once: on CPUs they are the same program.

An engine has two copies of each decoding program (`moe_jax.serving.programs`), and compiling them is most of the time
of its tests.
"""

import threading

import jax

OPTION = "xla_gpu_graph_min_graph_size"

_last = threading.local()
"""The program that a thread compiled last with the option. A thread compiles the copies of one after the other."""


def install() -> None:
    """Makes `compile` of a lowered program return the first copy for the others too, in this process."""
    compile_anew = jax.stages.Lowered.compile

    def compile_once(lowered, compiler_options=None, **options):
        if not compiler_options or compiler_options.keys() != {OPTION}:
            return compile_anew(lowered, compiler_options, **options)
        if getattr(_last, "lowered", None) is not lowered:
            _last.lowered, _last.compiled = lowered, compile_anew(lowered, compiler_options, **options)
        return _last.compiled

    jax.stages.Lowered.compile = compile_once
