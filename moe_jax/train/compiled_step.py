"""A training step that is compiled at its first call, with as many layers that keep their residuals as fit into memory.

With `remat="auto"` the model of cost (`moe_jax.cost`) chooses how many last layers keep their residuals, and which parts of
them the other layers keep. The memory of the compiled program is checked before the first step. At most three programs are
compiled: for the chosen number, for a smaller one by the missing bytes, and with all layers recomputed.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from moe_jax.cost import PlannedStep
from moe_jax.cost.memory import activations, kept_parts, memory_bytes
from moe_jax.cost.planned_step import PlannedAdapters
from moe_jax.cost.step import with_fastest_kept
from moe_jax.kernels.backends import on_one_device
from moe_jax.layers.moe import precision_of
from moe_jax.layers.passes import Remat
from moe_jax.models.execution import Execution
from moe_jax.models.precision import Weights
from moe_jax.models.remat import remat_option
from moe_jax.parallel.choices import MESH_AXES, MeshShape
from moe_jax.parallel.parallelism import Parallelism
from moe_jax.runtime.processes import texts_of_all
from moe_jax.train.batch import Batch, replicated_sharding
from moe_jax.train.state import TrainState, check_adapters, check_layout

Metrics = dict[str, Array]

StepRemat = Remat | int | str
"""A model's `remat`, a number of last layers that keep their residuals with parts of the others, or "auto": what fits."""

SPARE = 0.02
"""Share of a device's memory that "auto" leaves free, for gaps between arrays. Assumed, not measured."""

FILLS_MEMORY = {"xla_gpu_memory_limit_slop_factor": "110"}
"""XLA begins to recompute on its own where it expects a program to need more than this percentage of the memory, by default 95.
It expects 3 % too much. On an H200 a step of adapters with 131 of 133 GiB in use became 28 % slower."""

GIB = 2**30


class TrainStep:
    """A jitted step(state, batch) -> (state, metrics), compiled for the layout of its first state. States keep that layout.

    Attributes:
      remat: as in `make_train_step`; `prepare` replaces "auto" by its choice.
    """

    def __init__(
        self,
        function_of: Callable[[Remat | int | str], Callable],
        remat: StepRemat,
        parallelism: Parallelism | None,
        plan: Callable[[TrainState, Batch], PlannedStep | str],
    ):
        """Creates a step that is not traced yet.

        Args:
          function_of: returns train_step(one_device, state, frozen, batch) for a `remat` other than "auto".
          plan: returns the step for the model of cost, or the reason why the model cannot predict it.
        """
        self.remat, self.parallelism = remat, parallelism
        self._function_of, self._plan = function_of, plan
        self._function = function_of(True if remat == "auto" else remat)
        self._jitted: Any = None

    def set_remat(self, remat: Remat | int | str) -> None:
        """Replaces `remat` before the first call."""
        self.remat, self._function = remat, self._function_of(remat)

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Trains on a batch."""
        is_first = self._jitted is None
        self.prepare(state, batch)
        # Frozen weights are a separate argument, because the state is donated.
        arguments = state.without_frozen, state.frozen, batch
        if not is_first:
            after, metrics = self._jitted(*arguments)
        else:
            with _advised(self._advice(state, batch)):
                # An error of the allocator may arrive only with the result.
                after, metrics = jax.block_until_ready(self._jitted(*arguments))
        return replace(after, frozen=state.frozen), metrics

    def prepare(self, state: TrainState, batch: Batch) -> str:
        """Checks the layout of the first state, and chooses `remat` if it is "auto"; later calls do nothing.

        All processes of a job call this together. Arrays may be their shapes with shardings.

        Returns:
          A line about the choice; empty without one.
        """
        if self._jitted is not None:
            return ""
        check_layout(state, self.parallelism)
        check_adapters(state.frozen, self.parallelism)
        told = self._choose(state, batch) if self.remat == "auto" else ""
        self._jitted = self._jit(state)
        return told

    def compiled(self, state: TrainState, batch: Batch) -> jax.stages.Compiled:
        """Returns the program of these arguments. JAX uses it for the step too. Arrays may be their shapes with shardings."""
        return self._jit(state).lower(state.without_frozen, state.frozen, batch).compile()

    def _jit(self, state: TrainState) -> Any:
        one_device = self.parallelism is None and len(jax.tree.leaves(state.params)[0].sharding.device_set) == 1
        function = partial(self._function, one_device)
        return jax.jit(
            on_one_device(function) if one_device else function,
            donate_argnums=0,
            # The state keeps its layout: XLA's own choice could differ, and the next step would compile again. Metrics are
            # whole on every device, so that each process can read them.
            out_shardings=(jax.tree.map(lambda x: x.sharding, state.without_frozen), replicated_sharding(state.params)),
            compiler_options=self._compiler_options(),
        )

    def _compiler_options(self) -> dict[str, str | bool]:
        """Returns XLA's options. Layers that keep residuals may fill the memory: XLA must not recompute others on its own."""
        options = {} if self.parallelism is None else self.parallelism.compiler_options
        execution = Execution().with_remat(True if self.remat == "auto" else self.remat)
        return options | (FILLS_MEMORY if execution.num_kept or execution.keep else {})

    def _choose(self, state: TrainState, batch: Batch) -> str:
        """Sets `remat` and the step's function; returns a line about them."""
        room, planned = room_of(state), self._plan(state, batch)
        if room is None or isinstance(planned, str):
            self.set_remat(True)
            return f"remat: all layers are recomputed, because {'the memory limit is unknown' if room is None else planned}"
        free, stage, total = room.free - SPARE * room.limit, planned.stages[-1], planned.num_layers
        kept = most_kept(planned, free)
        number, keep = kept.num_kept, kept.keep
        layer = activations(planned, stage) - kept_parts(kept, stage)
        for trial in range(4):
            self.set_remat(remat_option(number, keep))
            needed = needed_bytes(self.compiled(state, batch))
            if needed <= free or not (number or keep):
                break
            # A later trial leaves more room, because the model counted too little twice. The last keeps nothing.
            number = 0 if trial == 2 else max(0, number - math.ceil((needed - free) / layer) - trial)
            keep = keep if number else ()
        which = f"the last {number} of {total} layers keep their residuals" if number else f"all {total} layers are recomputed"
        which += f", {'the others' if number else 'and'} keep {', '.join(keep)}" if keep else ""
        return f"remat: {which} ({(room.limit - room.free + needed) / GIB:.1f} GiB of {room.limit / GIB:.1f} GiB)"

    def _advice(self, state: TrainState, batch: Batch) -> str:
        """Returns what to change if the step runs out of memory."""
        assert self.remat != "auto", "`prepare` has replaced it"
        execution = Execution().with_remat(self.remat)
        if execution.keep:
            return f"Give remat={execution.num_kept} (--remat {execution.num_kept}), which keeps no parts of other layers."
        if execution.remat and not execution.num_kept:
            return "All layers are recomputed already: give fewer rows, or more micro-batches."
        planned, room = self._plan(state, batch), room_of(state)
        if isinstance(planned, str):
            return "Give remat=True, which recomputes all layers."
        kept = min(execution.num_kept, planned.num_layers) if execution.remat else planned.num_layers
        # The model of cost may count too little, so the number is smaller in each case.
        fits = min(kept * 7 // 8, kept if room is None else most_kept(planned, room.free).num_kept)
        return (
            f"Give remat={fits} (--remat {fits}): the last {kept} layers keep their residuals now, which needs too much memory."
        )


class Room(NamedTuple):
    """The memory of one device, in bytes."""

    limit: float
    """Bytes that the process may allocate."""
    free: float
    """Bytes of the limit that no live array uses."""


def room_of(state: TrainState) -> Room | None:
    """Returns the smallest room of all devices; None if a device does not tell its limit.

    All processes of a job call this together, and get the same result.
    """
    devices = jax.tree.leaves(state.params)[0].sharding.addressable_devices
    found = [device.memory_stats() or {} for device in devices]
    own = [(stats.get("bytes_limit"), stats.get("bytes_in_use", 0)) for stats in found]
    rooms = [(limit, limit - in_use) for limit, in_use in own if limit]
    text = json.dumps(rooms if len(rooms) == len(own) else [])
    of_all = [json.loads(text) for text in (texts_of_all(text) if jax.process_count() > 1 else [text])]
    return Room(*map(min, zip(*sum(of_all, []), strict=True))) if all(of_all) else None


def needed_bytes(program: jax.stages.Compiled) -> float:
    """Returns the bytes that a program needs on each device in addition to its arguments."""
    found = program.memory_analysis()
    assert found is not None, "GPUs have an account"
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    return found.temp_size_in_bytes + results + found.generated_code_size_in_bytes


def most_kept(planned: PlannedStep, free: float) -> PlannedStep:
    """Returns the fastest step whose layers and parts can keep their residuals within the bytes that the state leaves free."""
    parts = memory_bytes(planned)
    return with_fastest_kept(planned, free + parts["parameters"] + parts["moments"])


def planned_step(
    graphdef: nnx.GraphDef,
    parallelism: Parallelism | None,
    micro_batches: int,
    overlaps: bool,
    state: TrainState,
    batch: Batch,
) -> PlannedStep | str:
    """Returns the training step for the model of cost, or the reason why that model cannot predict its memory.

    Args:
      overlaps: neighbouring micro-batches overlap.
    """
    if parallelism is not None and parallelism.pipelined:
        return "a pipe keeps the residuals of all layers or of none"
    if parallelism is None and len(jax.tree.leaves(state.params)[0].sharding.device_set) > 1:
        return "without a Parallelism the layout is XLA's choice"
    model = nnx.merge(graphdef, state.params, state.fixed)
    if model.dtype != jnp.bfloat16 or "tokens" not in batch:
        return f"the model of cost has no prediction for dtype {model.dtype.name} or this batch"
    precision = precision_of(model)
    options: dict[str, Any] = {}
    mesh = MeshShape()
    if parallelism is not None:
        mesh = MeshShape(**{axis: parallelism.mesh.shape.get(axis, 1) for axis in MESH_AXES})
        options = dict(
            hops=parallelism.hops,
            context_method=parallelism.context.method,
            capacity_factor=parallelism.expert.capacity_factor,
            tokens_in_fp8=parallelism.expert.tokens_in_fp8,
            shard_optimizer=parallelism.splits_optimizer,
        )
    if state.frozen:
        sizes = {jax.tree_util.keystr(path): adapter.size for path, adapter in jax.tree.leaves_with_path(state.params)}
        on_experts = any("down_lora" in path for path in sizes)
        options["adapters"] = PlannedAdapters(sum(sizes.values()), 0.0, "", _form(state.frozen), on_experts)
    else:
        moments = max(jax.tree.leaves(state.opt_state), key=lambda a: a.size)
        options |= dict(param_dtype=jax.tree.leaves(state.params)[0].dtype.name, moment_dtype=moments.dtype.name)
    rows, sequence_length = batch["tokens"].shape
    try:
        return PlannedStep(
            model.config,
            mesh,
            rows,
            sequence_length,
            gradient_accumulation=micro_batches,
            overlap_micro_batches=overlaps,
            precision="bf16" if precision is None else "fp8_kept" if precision.kept == "fp8" else "fp8",
            **options,
        )
    except ValueError as error:
        return f"the model of cost has no prediction: {error}"


def _form(frozen: nnx.State) -> Weights:
    """Returns the form of frozen weights; quantised ones have codes of 8 bits."""
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(frozen)}
    return "nf4" if jnp.uint8 in dtypes else "fp8" if jnp.float8_e4m3fn in dtypes else "whole"


@contextmanager
def _advised(advice: str) -> Iterator[None]:
    """Adds advice to an error about memory."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            error.add_note(advice)
        raise
