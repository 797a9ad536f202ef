"""Times the parts of the engine's decoding step of Qwen3-30B-A3B with random weights, on one Hopper GPU.

    python benchmarks/decoding_parts.py kernels     # a step by kernel: 12 layers, 1, 16, 64 and 256 sequences, by the profiler
    python benchmarks/decoding_parts.py launches    # 48 layers with narrow experts: what the host's launches cost
    python benchmarks/decoding_parts.py loads       # a layer's experts loaded by TMA, by the shape of the boxes, not multiplied
    python benchmarks/decoding_parts.py matmuls     # projections as partial sums: by XLA in 1 to 8 parts, in the engine, strict

`--small` takes sizes for a CPU, as a smoke test of all but `loads`.
"""

import argparse
import collections
import functools
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.profiler import ProfileData

from moe_jax.config import NAMED_CONFIGS
from moe_jax.kernels.decode.project import project
from moe_jax.kernels.hopper.launch import launch, operand_transforms
from moe_jax.kernels.strict.matmul import matmul_in_parts
from moe_jax.models.random_weights import random_model
from moe_jax.serving.drawing import draw_program
from moe_jax.serving.pages import pages_of
from moe_jax.serving.programs import leave_gaps
from moe_jax.serving.sampling import init_slots
from moe_jax.serving.step import StepShape, empty_rows, initial_state, output_like, packed, step
from moe_jax.serving.weights import take_apart

CONTEXT = 128
SMALL = dict(hidden_size=64, num_experts=8, moe_intermediate_size=64, vocab_size=512)
BOXES = (256, 64), (128, 64), (64, 64), (128, 128), (64, 256), (32, 256), (16, 256), (16, 512), (8, 1024)
MATRICES = {
    "q, k, v": ((4096, 512, 512), 2048),
    "o": ((2048,), 4096),
    "router": ((128,), 2048),
    "q, k, v of Qwen3-32B": ((8192, 1024, 1024), 5120),
    "o of Qwen3-32B": ((5120,), 8192),
    "down of Qwen3-32B": ((5120,), 25600),
}
"""The rows of a projection's matrices, and its summands."""

SMALL_MATRICES = {"q, k, v": ((128, 64, 64), 512)}


def main() -> None:
    """Prints a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("kernels", "launches", "loads", "matmuls"))
    parser.add_argument("--small", action="store_true", help="sizes for a CPU, as a smoke test")
    args = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    {"kernels": kernels, "launches": launches, "loads": loads, "matmuls": matmuls}[args.part](args.small)


class DecodingStep:
    """A step of some sequences with CONTEXT tokens each, launched again and again.

    Args:
      writes_over: results are written over those of the last step, as the engine's are.
    """

    def __init__(self, model, sequences: int, *, writes_over: bool = True):
        self.served, weights = take_apart(model)
        leaves, tree = jax.tree.flatten(weights)
        device = jax.devices()[0]
        self.weights = jax.device_put(leaves, device)
        shape = StepShape(sequences, 0, 0, pages_of(CONTEXT))
        rows = empty_rows(shape)
        rows.decode_slots[:], rows.decode_positions[:] = np.arange(sequences), CONTEXT - 2
        self.upload = packed([rows])
        state = initial_state(self.served, 1 + sequences * pages_of(CONTEXT), sequences, pages_of(CONTEXT))
        table = 1 + np.arange(state.page_table.size, dtype=np.int32).reshape(state.page_table.shape)
        tokens = np.random.default_rng(0).integers(0, self.served.config.vocab_size, sequences).astype(np.int32)
        self.state = jax.device_put(state._replace(page_table=table, last_token=tokens), device)
        self.options = jax.device_put(init_slots(sequences), device)

        def of_leaves(leaves, state, upload, output):
            return step(self.served, shape, jax.tree.unflatten(tree, leaves), state, upload)

        zeros = lambda a: jax.device_put(np.zeros(a.shape, a.dtype), device)  # noqa: E731
        like = output_like(self.served, weights, shape)
        self.output = jax.tree.map(zeros, like) if writes_over else None
        program = jax.jit(of_leaves, donate_argnums=(1, 3), keep_unused=True)
        self.program = program.lower(self.weights, self.state, self.upload, self.output).compile()

    def __call__(self):
        """Starts a step; returns the tokens that it draws."""
        state, output = self.program(self.weights, self.state, self.upload, self.output)
        last_token, _, drawn, *_ = draw_program("greedy")(output, self.options, state.last_token, None)
        self.state = state._replace(last_token=last_token)
        if self.output is not None:
            self.output = output
        return drawn.tokens


def model_of(layers: int, small: bool, **sizes):
    """Returns Qwen3-30B-A3B with this number of layers."""
    config = replace(NAMED_CONFIGS["qwen3-30b-a3b"], num_hidden_layers=2 if small else layers, **(SMALL if small else sizes))
    return random_model(config, jnp.dtype(jnp.float32 if small else jnp.bfloat16))


def kernels(small: bool) -> None:
    """Prints the time of a step, and of its kernels by name."""
    model = model_of(12, small)
    for sequences in (1, 4) if small else (1, 16, 64, 256):
        run = DecodingStep(model, sequences)
        print(f"{sequences} sequences: {1e3 * seconds_of(run):.3f} ms")
        for name, time_us in microseconds_of_kernels(run).most_common(16):
            print(f"  {time_us:9.1f} us a step  {name}")


def microseconds_of_kernels(run: Callable, calls: int = 3) -> collections.Counter[str]:
    """Returns the time of a call's kernels by name, by the profiler."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([run() for _ in range(calls)])
        files = list(Path(folder).rglob("*.xplane.pb"))
        planes = [plane for file in files for plane in ProfileData.from_file(str(file)).planes]
    microseconds = collections.Counter[str]()
    for line in (line for plane in planes if plane.name.startswith("/device:GPU:0") for line in plane.lines):
        if line.name.startswith("Stream"):
            for event in line.events:
                microseconds[re.sub(r"[._]\d+$", "", event.name)[:60]] += event.duration_ns / 1e3 / calls
    return microseconds


def launches(small: bool) -> None:
    """Prints the time of a step whose tokens are read when the next one has been launched, as the engine reads them."""
    model = model_of(48, small, moe_intermediate_size=128)
    for writes_over in (False, True):
        run = DecodingStep(model, 1, writes_over=writes_over)
        for has_gaps in (False, True, False, True):
            # Gaps last as long as these arrays live.
            borders = leave_gaps(jax.devices()[0]) if has_gaps else []
            hosts: list[float] = []

            def late(run=run, hosts=hosts, before=[None]):  # noqa: B006  the tokens of the step before
                began = time.perf_counter()
                tokens = run()
                tokens.copy_to_host_async()
                hosts.append(time.perf_counter() - began)
                if before[0] is not None:
                    np.asarray(before[0])
                before[0] = tokens
                return tokens

            read_late = seconds_of(late)
            how = f"{'written over' if writes_over else 'new arrays'}, {'gaps' if borders else 'no gaps'}"
            print(f"{how}: {1e3 * read_late:.2f} ms, launch {1e3 * statistics.median(hosts):.2f} ms", flush=True)


def loads(small: bool) -> None:
    """Prints the rate at which a kernel loads one layer's experts."""
    del small
    for rows, columns in ((128 * 1536, 2048), (128 * 2048, 768)):
        w = jnp.zeros((rows, columns), jnp.bfloat16)
        for box in BOXES:
            if columns % box[1] == 0:
                seconds = seconds_of(functools.partial(load_by_boxes, w, box))
                print(
                    f"[{rows}, {columns}] by {box[0]} x {box[1]}: {1e6 * seconds:.1f} us, {w.nbytes / seconds / 1e12:.2f} TB/s"
                )


@functools.partial(jax.jit, static_argnums=1)
def load_by_boxes(w: jax.Array, box: tuple[int, int]) -> jax.Array:
    """Loads all of w into shared memory, a ring of boxes a thread block."""
    height, width = box
    steps, stages = w.shape[1] // width, min(200 * 1024 // (height * width * 2), 24)

    def body(w_ref, out_ref, ring, barriers):
        own, stride = lax.axis_index("block"), lax.axis_size("block")
        count = lax.div(w.shape[0] // height - own + stride - 1, stride) * steps

        def load(i):
            tile, k = own + lax.div(i, jnp.int32(steps)) * stride, lax.rem(i, jnp.int32(steps))
            slot = lax.rem(i, jnp.int32(stages))
            source = w_ref.at[pl.ds(tile * height, height), pl.ds(k * width, width)]
            plgpu.copy_gmem_to_smem(source, ring.at[slot], barriers.at[slot])

        for i in range(stages):
            pl.when(i < count)(functools.partial(load, jnp.int32(i)))

        @pl.loop(0, count)
        def _(i):
            plgpu.barrier_wait(barriers.at[lax.rem(i, jnp.int32(stages))])
            pl.when(i + stages < count)(lambda: load(i + stages))

        out_ref[own] = plgpu.load(
            w_ref.at[0, pl.ds(0, 128)], layout=plgpu.Layout.WG_STRIDED((128,), vec_size=1), optimized=False
        )

    ring = plgpu.SMEM((stages, height, width), w.dtype, transforms=operand_transforms(w.dtype))
    scratch = [ring, plgpu.Barrier(num_barriers=stages)]
    output = jax.ShapeDtypeStruct((1024, 128), w.dtype)
    return launch("loads", body, [output], scratch, warpgroups=1, blocks_per_core=1)(w)[0]


def matmuls(small: bool) -> None:
    """Prints the time of a projection's kernels, by XLA and as the engine computes it; one part leaves the choice to XLA.

    Small sizes leave out strict bits, which a CPU interprets.
    """
    for name, (heights, summands) in (SMALL_MATRICES if small else MATRICES).items():
        # Together they do not fit the L2 cache.
        number = 2 if small else 128 if name == "router" else 12
        layers = [[jnp.full((n, summands), 0.01 * i, jnp.bfloat16) for n in heights] for i in range(number)]
        ways = {f"{parts} parts": functools.partial(by_xla, parts=parts) for parts in (1, 2, 4, 8)} | {"project": project}
        if not small:
            ways["strict"] = matmul_in_parts
        for tokens in (1, 2, 16, 64, 128, 256):
            times = []
            for way, multiply in ways.items():

                def of_all(x, layers, multiply=multiply):
                    sums = []
                    for weights in layers:
                        y = multiply(x, *weights)
                        x = lax.optimization_barrier((x, y))[0]
                        sums.append(y[0, 0, 0])
                    return jnp.stack(sums)

                run = functools.partial(jax.jit(of_all), jnp.ones((tokens, summands), jnp.bfloat16), layers)
                jax.block_until_ready([run() for _ in range(3)])
                times.append(f"{way} {microseconds_of_kernels(run).total() / number:.2f} us")
            print(f"{name}, {tokens} tokens: {', '.join(times)}", flush=True)


def by_xla(x: jax.Array, *weights: jax.Array, parts: int) -> jax.Array:
    """Computes `project` by XLA, with this number of parts."""
    x, w = (a.reshape(len(a), parts, -1) for a in (x, jnp.concatenate(weights)))
    return jnp.einsum("nsk,osk->sno", x, w, preferred_element_type=jnp.float32)


def seconds_of(run: Callable, calls: int = 20) -> float:
    """Returns the median seconds of a call, started one after the other."""
    jax.block_until_ready([run() for _ in range(5)])
    times = []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready([run() for _ in range(calls)])
        times.append((time.perf_counter() - began) / calls)
    return statistics.median(times)


if __name__ == "__main__":
    main()
