"""Times the parts of one decoding step of the engine: kernels on the device, and the host's plan.

    python benchmarks/decoding_step.py                  # by kernel: 12 layers of Qwen3-30B-A3B, 1, 16, 64 and 256 sequences
    python benchmarks/decoding_step.py host             # the plan, and the tokens of the step before; needs no GPU

`kernels` reads the profiler, which names no kernels on a CPU.

`host`: each sequence has a prompt of `--prompt` tokens and decodes; a step is planned before the step before is read, as the
engine does. The tokens come from no device. Rows have CPU microseconds of a step in which all sequences decode: the median, and
the 99th percentile. The time of arrays, uploads, text and delivery is not in it. `admit` is the plan of one more prompt, hashed
and chunked, while the others decode.
"""

import collections
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from harness import Case, main
from inputs import config_of
from jax.profiler import ProfileData

from moe_jax.kernels.attention.paged import PAGE_SIZE
from moe_jax.models.random_weights import random_model
from moe_jax.serving.batch import StepShape, empty_rows, packed
from moe_jax.serving.drawing import draw_program
from moe_jax.serving.limits import EngineLimits
from moe_jax.serving.pages import pages_of
from moe_jax.serving.queues import EngineQueues, finish
from moe_jax.serving.request import SamplingOptions
from moe_jax.serving.sampling import init_slots
from moe_jax.serving.schedule import plan_step, read_step
from moe_jax.serving.sequence import Sequence
from moe_jax.serving.step import initial_state, output_like, step
from moe_jax.serving.weights import take_apart

CONTEXT = 128


@dataclass(kw_only=True)
class Kernels(Case):
    """A row for each kernel of a step."""

    layers: int = 12
    sequences: tuple[int, ...] = (1, 16, 64, 256)

    SMALL = dict(layers=2, sequences=(1,))

    def results(self):
        """Yields the time of a step, and of its kernels by name."""
        config = config_of("qwen3-30b-a3b", small=self.small, layers=self.layers)
        model = random_model(config, jnp.dtype(jnp.float32 if self.small else jnp.bfloat16))
        for sequences in self.sequences:
            run = DecodingStep(model, sequences)
            yield dict(sequences=sequences, us=1e6 * seconds_of(run, 1 if self.small else 20), name="step")
            for name, time_us in microseconds_of_kernels(run).most_common(16):
                yield dict(sequences=sequences, us=time_us, name=name)


class DecodingStep:
    """A step of some sequences with CONTEXT tokens each; its results are written over those of the last step."""

    def __init__(self, model, sequences: int):
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
        self.output = jax.tree.map(zeros, like)
        program = jax.jit(of_leaves, donate_argnums=(1, 3), keep_unused=True)
        self.program = program.lower(self.weights, self.state, self.upload, self.output).compile()

    def __call__(self):
        """Starts a step; returns the tokens that it draws."""
        state, self.output = self.program(self.weights, self.state, self.upload, self.output)
        drawn = draw_program("greedy")(self.output, self.options, state.last_token, None)
        self.state = state._replace(last_token=drawn.last_token)
        return drawn.sampled.tokens


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


def seconds_of(run: Callable, calls: int) -> float:
    """Returns the median seconds of a call, started one after the other."""
    jax.block_until_ready([run() for _ in range(5)])
    times = []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready([run() for _ in range(calls)])
        times.append((time.perf_counter() - began) / calls)
    return statistics.median(times)


@dataclass(kw_only=True)
class Host(Case):
    """A row for each number of sequences."""

    sequences: tuple[int, ...] = (1, 64, 256)
    prompt: int = 1024
    steps: int = 1000

    SMALL = dict(sequences=(2,), prompt=100, steps=30)

    def results(self):
        """Yields the rows."""
        for sequences in self.sequences:
            plan, read, admit = self.times(sequences)
            parts = {"plan": plan, "read": read, "both": plan + read, "admit": admit}
            row: dict = {"sequences": sequences}
            for name, each in parts.items():
                row |= {f"{name}_us": float(np.median(each)), f"{name}_p99_us": float(np.percentile(each, 99))}
            yield row

    def times(self, sequences: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the microseconds of each plan, of each reading, and of plans that admit one more prompt."""
        length = self.prompt + self.steps + 2 * PAGE_SIZE
        limits = EngineLimits(
            max_sequences=sequences + 1,
            max_tokens_per_step=8192,
            max_length=length,
            num_pages=1 + (sequences + 2) * pages_of(length),
        )
        queues, rng = EngineQueues(limits), np.random.default_rng(0)
        options = SamplingOptions(max_new_tokens=length - self.prompt)

        def add() -> Sequence:
            tokens = rng.integers(1000, size=self.prompt).tolist()
            queues.waiting.append(Sequence(tokens, options, ends=frozenset([1000])))
            return queues.waiting[-1]

        for _ in range(sequences):
            add()
        unread, plans, reads, admits = None, [], [], []
        while len(plans) < self.steps:
            # Every 50th step one more prompt comes; it leaves after its first token.
            guest = add() if unread and len(unread[0].decodes) == sequences and len(plans) % 50 == 25 else None
            began = time.thread_time()
            plan = plan_step(queues)
            planned = time.thread_time()
            tokens = [[len(plans) % 1000]] * len(plan.samples)
            before = time.thread_time()
            if unread:
                read_step(queues, *unread)
            after = time.thread_time()
            unread = plan, tokens
            if guest:
                admits.append(planned - began)
                finish(queues, guest, "abort")
            if len(plan.decodes) == sequences:
                plans.append(planned - began)
                reads.append(after - before)
        return 1e6 * np.array(plans), 1e6 * np.array(reads), 1e6 * np.array(admits)


CASES = {"kernels": Kernels, "host": Host}

if __name__ == "__main__":
    main(__doc__, CASES)
