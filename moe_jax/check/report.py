"""`moe-jax check`: runs one forward and one backward pass of a model, and reports results and times."""

import os
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from moe_jax.checkpoint.hf_load import find_checkpoint, from_pretrained, read_config
from moe_jax.checkpoint.hf_names import hf_tensors
from moe_jax.checkpoint.tokenizer import load_tokenizer
from moe_jax.config import ModelConfig
from moe_jax.cost.flops import num_active_parameters, num_parameters
from moe_jax.generation import generation_mesh
from moe_jax.kernels.shapes import vary_as
from moe_jax.layers.router import ExpertBias
from moe_jax.models.decoder import Decoder
from moe_jax.models.random_weights import random_model
from moe_jax.parallel.expert import ExpertParallel
from moe_jax.parallel.fsdp import ShardedParameters
from moe_jax.parallel.layout import mesh_of
from moe_jax.parallel.mesh import refuse_pipe
from moe_jax.parallel.spread import Spread


@dataclass(frozen=True)
class CheckReport:
    """The results of a check, in the order in which they are printed.

    Attributes:
      loss: sum of all logits; the stock implementation is measured with the same pass.
      forward_seconds: median of the timed calls, after a first call that also loads and tunes kernels.
      backward_seconds: median time of forward and backward together, minus `forward_seconds`. None if the difference is not
        above 0: the passes are then too short to measure.
    """

    device: str
    dtype: str
    tokens: int
    parameters: int
    active_parameters: int
    next_token_id: int
    next_token: str | None
    logprob: float
    forward_seconds: float
    loss: float
    gradient_norm: float
    tensors_with_gradients: int
    arrays_with_gradients: int
    max_gradient: float
    min_gradient: float
    backward_seconds: float | None
    compile_seconds: float
    peak_memory_gib: float


def check_checkpoint(
    path: str | Path,
    prompt: str,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    devices: Sequence[jax.Device] | None = None,
    repeats: int = 5,
) -> CheckReport:
    """Checks a Hugging Face folder or hub id on a prompt, with the special tokens that its tokenizer adds to a text.

    Args:
      path: the folder or hub id.
      prompt: the text.
      dtype: the dtype that the model computes in.
      devices: the devices that share the parameters and the experts; None: the default device.
      repeats: number of timed calls of each pass.

    Raises:
      ValueError: the prompt is empty, `repeats` is below 1, there is no tokenizer, or `from_pretrained` refuses the
        checkpoint. No weights have been read then.
      FileNotFoundError: the path is neither a folder nor a model on the hub.
    """
    _require_positive(repeats=repeats)
    folder = find_checkpoint(path)
    config = read_config(folder, mtp=False)
    tokenizer = load_tokenizer(folder)
    tokens = tokenizer(prompt)["input_ids"]
    if not tokens:
        raise ValueError("the prompt has no tokens; give some text")
    model = from_pretrained(folder, dtype=dtype, mesh=_mesh(devices, config), mtp=False)
    return check_model(model, tokens, tokenizer=tokenizer, repeats=repeats)


def check_random(
    config: ModelConfig,
    num_tokens: int,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    devices: Sequence[jax.Device] | None = None,
    seed: int = 0,
    repeats: int = 5,
) -> CheckReport:
    """Checks a config with random weights on random tokens: speed and memory without a checkpoint.

    Neither this function nor `check_checkpoint` builds multi-token prediction modules.

    Args:
      config: the model.
      num_tokens: length of the sequence.
      dtype, devices, repeats: as in `check_checkpoint`.
      seed: seed of weights and tokens.

    Raises:
      ValueError: `num_tokens` or `repeats` below 1.
    """
    _require_positive(num_tokens=num_tokens, repeats=repeats)
    tokens = np.random.default_rng(seed).integers(0, config.vocab_size, num_tokens)
    model = random_model(config.without_mtp(), dtype, seed, mesh=_mesh(devices, config))
    return check_model(model, tokens.tolist(), repeats=repeats)


def check_model(model: Decoder, tokens: list[int], *, tokenizer: Any = None, repeats: int = 5) -> CheckReport:
    """Runs both passes on one sequence, on the devices that hold the model.

    Raises:
      ValueError: the mesh axis `expert` of these devices does not divide the number of experts, or `pipe` has several devices.
    """
    config, mesh = model.config, mesh_of(nnx.state(model, nnx.Param))
    refuse_pipe(mesh, "check_model")
    *passes, arguments = passes_over(model, tokens)
    began = time.perf_counter()
    forward, both = (jax.jit(f).lower(*arguments).compile() for f in passes)
    compile_seconds = time.perf_counter() - began

    log_probabilities = jax.nn.log_softmax(forward(*arguments))
    next_token_id = int(log_probabilities.argmax())
    forward_seconds = _median_seconds(lambda: forward(*arguments), repeats)
    both_seconds = _median_seconds(lambda: both(*arguments), repeats)
    loss, gradients = both(*arguments)
    norm, largest, smallest = (float(x) for x in _gradient_statistics(gradients))
    kind = jax.devices()[0].device_kind
    return CheckReport(
        device=kind if mesh is None else f"{mesh.size} x {kind}",
        dtype=str(model.dtype),
        tokens=len(tokens),
        parameters=num_parameters(config),
        active_parameters=num_active_parameters(config),
        next_token_id=next_token_id,
        next_token=None if tokenizer is None else tokenizer.decode([next_token_id]),
        logprob=float(log_probabilities[next_token_id]),
        forward_seconds=forward_seconds,
        loss=float(loss),
        gradient_norm=norm,
        tensors_with_gradients=sum(tensor.trained for tensor in hf_tensors(config)),
        arrays_with_gradients=len(jax.tree.leaves(gradients)),
        max_gradient=largest,
        min_gradient=smallest,
        backward_seconds=both_seconds - forward_seconds if both_seconds > forward_seconds else None,
        compile_seconds=compile_seconds,
        peak_memory_gib=_peak_memory() / 2**30,
    )


def format_report(report: CheckReport) -> str:
    """Returns the report as text for people."""
    backward = "too short to tell from the forward time"
    if report.backward_seconds is not None:
        backward = f"{report.backward_seconds:.6f} s (forward and backward together, less the forward time)"
    token = "" if report.next_token is None else f"\nToken: {report.next_token!r}"
    return (
        f"{report.device}, {report.dtype}, {report.tokens} tokens, {report.parameters / 1e9:.3f} B parameters "
        f"({report.active_parameters / 1e9:.3f} B active); compiled in {report.compile_seconds:.1f} s\n"
        f"\nNext token\nToken ID: {report.next_token_id}{token}\nLogprob: {report.logprob:.6f}\n"
        f"Forward time: {report.forward_seconds:.6f} s\n"
        f"\nBackward pass of the sum of all logits\nLoss: {report.loss:.4f}\nTotal gradient norm: {report.gradient_norm:.6f}\n"
        f"Parameters with gradients: {report.tensors_with_gradients} tensors of a checkpoint, "
        f"held as {report.arrays_with_gradients} stacked arrays\n"
        f"Max gradient value: {report.max_gradient:.6f}\nMin gradient value: {report.min_gradient:.6f}\n"
        f"Backward time: {backward}\n"
        f"Peak memory: {report.peak_memory_gib:.2f} GiB"
    )


def _require_positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1; got {number}")


def _mesh(devices: Sequence[jax.Device] | None, config: ModelConfig) -> Mesh | None:
    return None if devices is None else generation_mesh(devices, config)


@jax.jit
def _gradient_statistics(gradients):
    """Returns the norm, maximum and minimum over all gradients, in float32."""
    leaves = jax.tree.leaves(gradients)
    # One layer at a time: a whole stacked gradient in float32 would take twice the memory of the gradient itself.
    squares = [jax.lax.map(lambda row: jnp.square(row.astype(jnp.float32)).sum(), leaf).sum() for leaf in leaves]
    norm = jnp.sqrt(sum(squares))
    return norm, jnp.stack([leaf.max() for leaf in leaves]).max(), jnp.stack([leaf.min() for leaf in leaves]).min()


def _median_seconds(run, repeats: int) -> float:
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - began)
    # The first call also loads and tunes kernels.
    return statistics.median(seconds[1:])


def _peak_memory() -> int:
    """Returns the peak bytes of a device, or of this process if the device is the CPU."""
    devices = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [stats["peak_bytes_in_use"] for stats in devices if "peak_bytes_in_use" in stats]
    if peaks:
        return max(peaks)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if os.uname().sysname == "Darwin" else peak * 1024


def passes_over(model: Decoder, tokens: list[int]) -> tuple[Callable, Callable, tuple]:
    """Returns the functions (forward, both) that run a model over `tokens` on its devices, and their arguments.

    forward(*arguments) returns the last token's logits in float32. both(*arguments) returns the sum of all logits and its
    gradients to the parameters. On a mesh, matrices are gathered layer by layer and tokens travel to their experts. Each device
    has one row of tokens. The first row is the sequence; all others are masked padding.
    """
    graph, parameters, *biases = nnx.split(model, nnx.Param, ExpertBias)
    mesh = mesh_of(parameters)
    if mesh is None:
        return *_on_one(graph), (parameters, biases, jnp.asarray(tokens, jnp.int32)[None])
    return *_on(mesh, graph, parameters, model.dtype), (parameters, biases, *_rows_of_devices(tokens, mesh))


def _on_one(graph: nnx.GraphDef) -> tuple[Callable, Callable]:
    def logits(parameters, biases, tokens):
        return nnx.merge(graph, parameters, *biases)(tokens).logits.astype(jnp.float32)

    def last_logits(*arguments):
        return logits(*arguments)[0, -1]

    def logit_sum(*arguments):
        return logits(*arguments).sum()

    return last_logits, jax.value_and_grad(logit_sum)


def _on(mesh: Mesh, graph: nnx.GraphDef, parameters: nnx.State, dtype) -> tuple[Callable, Callable]:
    axes = mesh.axis_names
    sharded = ShardedParameters.of(parameters, mesh, dtype=dtype, token_axes=axes)
    exchange = ExpertParallel() if mesh.shape.get("expert", 1) > 1 else None
    spread = Spread(expert=exchange, layer_gathers=sharded.layers, mesh_axes=axes)

    def logits(parameters, biases, tokens, segment_ids):
        model = nnx.merge(graph, sharded.enter(parameters), *vary_as(biases, tokens))
        output = model(tokens, segment_ids=segment_ids, spread=spread)
        return jnp.where(segment_ids[..., None] != 0, output.logits.astype(jnp.float32), 0)

    def last_logits(*arguments):
        return jax.lax.psum(logits(*arguments)[0, -1], axes)

    def logit_sum(*arguments):
        return jax.lax.psum(logits(*arguments).sum(), axes)

    whole, rows = PartitionSpec(), PartitionSpec(axes)
    in_specs = sharded.specs, whole, rows, rows
    forward = jax.shard_map(last_logits, mesh=mesh, in_specs=in_specs, out_specs=whole)
    both = jax.shard_map(jax.value_and_grad(logit_sum), mesh=mesh, in_specs=in_specs, out_specs=(whole, sharded.specs))
    return forward, both


def _rows_of_devices(tokens: list[int], mesh: Mesh) -> list[jax.Array]:
    """Returns tokens and segment_ids, [devices, tokens] each, spread over the mesh."""
    rows, segment_ids = (np.zeros((mesh.size, len(tokens)), np.int32) for _ in range(2))
    rows[0], segment_ids[0] = tokens, 1
    place = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return [jax.make_array_from_callback(a.shape, place, a.__getitem__) for a in (rows, segment_ids)]
