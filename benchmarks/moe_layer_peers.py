"""The layers that `moe_layer.py` times: ours, and alternatives in JAX and in PyTorch (peers).

A peer gets its weights in its own layout and is called as its documentation describes:

- `sonicmoe`: SonicMoE, https://arxiv.org/abs/2512.14080
- `grouped_mm`, `eager`: the two implementations of transformers, in its Qwen3-MoE block
- `tokamax`, `ragged_dot`: tokamax's kernel for Hopper and `jax.lax.ragged_dot`, tokens sorted by expert in jnp
"""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moe_jax.config import ExpertLayer

IN_JAX = ("tokamax", "ragged_dot")
IN_TORCH = ("sonicmoe", "grouped_mm", "eager")
PEERS = (*IN_TORCH, *IN_JAX)


@dataclass(frozen=True)
class Layer:
    """One system's layer with its data on the device."""

    forward: Callable[[], Any]
    """Starts a forward pass; returns y."""
    step: Callable[[], tuple]
    """Starts a forward and a backward pass; returns y and the gradients to x, router, w_gate_up and w_down."""
    wait: Callable[[Any], None]
    """Blocks until the result of `forward` or `step` is ready."""
    memory: Callable[[], dict[str, float]]
    """Returns MiB of the residuals, including x, and MiB of a step at its peak besides its inputs."""
    inputs: tuple
    """x, router, w_gate_up, w_down, dy."""
    to_common: Callable[[Any, Any, Any], tuple]
    """Returns router, w_gate_up and w_down (or their gradients) as [E, D], [E, 2I, D] with the gate first, [E, D, I]."""
    device: str
    round_weights: Callable[[], Any] | None = None
    """Starts what a step in FP8 does once for all micro-batches: it rounds the weights. None in bf16."""


def build(system: str, sizes: ExpertLayer, tokens: int, dtype: str, seed: int, precision: str = "bf16") -> Layer:
    """Returns a peer's layer, or ours on the backend named `system`, with random data.

    Args:
        precision: of our own layers, a name of `kernels.Precision`. FP8 copies of the weights are made before.
    """
    if system in IN_TORCH:
        return torch_layer(system, sizes, tokens, dtype, seed)
    return jax_layer(system, sizes, tokens, dtype, seed, "bf16" if system in IN_JAX else precision)


def jax_layer(system: str, sizes: ExpertLayer, tokens: int, dtype: str, seed: int, precision: str) -> Layer:
    """Returns our layer or a JAX peer's; the whole layer is one jitted function."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    import jax

    ours = system not in IN_JAX
    x, router, w_gate_up, w_down, dy = inputs = random_in_jax(sizes, tokens, dtype, seed, transposed=not ours)
    layer, forward_backward = passes_in_jax(system, sizes.top_k, precision)
    held, round_weights = (), None
    if precision != "bf16":
        from moe_jax.kernels.experts.fp8.passes import quantise_experts

        rounding = jax.jit(functools.partial(quantise_experts, matmuls=system))
        round_weights = functools.partial(rounding, w_gate_up, w_down)
        held = (jax.block_until_ready(round_weights()),)

    def residuals(held, x, *weights):
        found = jax.tree.leaves(jax.vjp(lambda *arrays: layer(*arrays, *held), x, *weights)[1])
        # The weights and their copies exist in any case, so they do not count. While tracing, one array is one tracer.
        others = jax.tree.leaves((held, weights))
        return list({id(a): a for a in found if all(a is not w for w in others)}.values())

    @functools.cache
    def compiled():
        return jax.jit(forward_backward).lower(*inputs, *held).compile()

    def memory() -> dict[str, float]:
        kept = sum(a.size * a.dtype.itemsize for a in jax.eval_shape(residuals, held, x, router, w_gate_up, w_down))
        found = compiled().memory_analysis()
        temporary = found.temp_size_in_bytes
        peak = temporary + found.output_size_in_bytes
        return {"kept_mib": kept / 2**20, "peak_mib": peak / 2**20, "temp_mib": temporary / 2**20}

    forward = jax.jit(layer)
    return Layer(
        forward=lambda: forward(x, router, w_gate_up, w_down, *held),
        step=lambda: compiled()(*inputs, *held),
        wait=jax.block_until_ready,
        memory=memory,
        inputs=inputs,
        to_common=(lambda *w: w) if ours else (lambda router, w_gate_up, w_down: (router, w_gate_up.mT, w_down.mT)),
        device=jax.devices()[0].device_kind,
        round_weights=round_weights,
    )


def passes_in_jax(system: str, k: int, precision: str = "bf16") -> tuple[Callable, Callable]:
    """Returns two functions: (x, router, w_gate_up, w_down) -> y, and (these, dy) -> y and the gradients of these four.

    With a precision in FP8 both take the copies of the weights as a last argument.
    """
    import jax
    import jax.numpy as jnp

    experts, choose = _experts_in_jax(system, precision), _router_in_jax(system, k)

    def layer(x, router, w_gate_up, w_down, *held):
        logits = jnp.einsum("td,ed->te", x, router)
        return experts(x, w_gate_up, w_down, *choose(logits.astype(jnp.float32)), *held)

    def forward_backward(x, router, w_gate_up, w_down, dy, *held):
        y, backward = jax.vjp(lambda *arrays: layer(*arrays, *held), x, router, w_gate_up, w_down)
        # As in training, dy is available only with y. Else XLA would begin the backward pass before the forward pass ends.
        y, dy = jax.lax.optimization_barrier((y, dy))
        return y, *backward(dy)

    return layer, forward_backward


def _router_in_jax(system: str, k: int) -> Callable:
    """Returns a function: logits -> the weights and ids of each token's experts. Ours is the layers' router."""
    import jax

    from moe_jax.layers.router import route

    def peers(logits):
        weights, chosen = jax.lax.top_k(jax.nn.softmax(logits), k)
        return weights / weights.sum(axis=1, keepdims=True), chosen

    return peers if system in IN_JAX else lambda logits: route(logits, k, norm_topk_prob=True)[:2]


def _experts_in_fp8(backend: str, precision: str) -> Callable:
    from moe_jax.kernels import Precision
    from moe_jax.kernels.experts.call import TokenPart
    from moe_jax.kernels.experts.call import experts as compute
    from moe_jax.kernels.experts.weights import ExpertWeights, Matrix

    recipe = Precision.named(precision)

    def experts(x, w_gate_up, w_down, weights, chosen, copies):
        matrices = ExpertWeights(*map(Matrix, (w_gate_up, w_down), copies))
        return compute([TokenPart(x, weights, chosen)], matrices, precision=recipe, backend=backend)[0]

    return experts


def random_in_jax(sizes: ExpertLayer, tokens: int, dtype: str, seed: int, transposed: bool = False) -> tuple:
    """Returns random x, router, w_gate_up, w_down and dy. If `transposed`, each expert's matrices are [in, out]."""
    import jax

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def draw(key, dims, std):
        # One slice at a time: the random bits of all of DeepSeek-V3's experts would take more memory than the weights.
        return jax.lax.map(lambda key: std * jax.random.normal(key, dims[1:], dtype), jax.random.split(key, dims[0]))

    keys = jax.random.split(jax.random.key(seed), 5)
    into, out = (sizes.hidden, 2 * sizes.inter), (sizes.inter, sizes.hidden)
    order = slice(None) if transposed else slice(None, None, -1)
    return (
        draw(keys[0], (tokens, sizes.hidden), 1.0),
        draw(keys[1], (sizes.experts, sizes.hidden), sizes.hidden**-0.5),
        draw(keys[2], (sizes.experts, *into[order]), sizes.hidden**-0.5),
        draw(keys[3], (sizes.experts, *out[order]), sizes.inter**-0.5),
        draw(keys[4], (tokens, sizes.hidden), sizes.hidden**-0.5),
    )


def _experts_in_jax(system: str, precision: str) -> Callable:
    import jax
    import jax.numpy as jnp

    if system == "tokamax":
        import tokamax

        dot = functools.partial(tokamax.ragged_dot, implementation="mosaic")
    elif system == "ragged_dot":
        dot = jax.lax.ragged_dot
    elif precision != "bf16":
        return _experts_in_fp8(system, precision)
    else:
        from moe_jax.kernels import experts_mlp

        return functools.partial(experts_mlp, backend=system)

    def sorted_by_expert(x, w_gate_up, w_down, weights, chosen):
        tokens, k = chosen.shape
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=w_down.shape[0]).astype(jnp.int32)
        gate, up = jnp.split(dot(x[order // k], w_gate_up, sizes), 2, axis=1)
        y = dot(jax.nn.silu(gate) * up, w_down, sizes)[jnp.argsort(order)].reshape(tokens, k, -1)
        return jnp.sum(y * weights[:, :, None].astype(y.dtype), axis=1)

    return sorted_by_expert


def torch_layer(system: str, sizes: ExpertLayer, tokens: int, dtype: str, seed: int) -> Layer:
    """Returns a PyTorch peer's layer. Its CUDA allocator counts the memory, so there is none on a CPU."""
    import torch

    torch.manual_seed(seed)
    on_gpu = torch.cuda.is_available()
    options = {"device": "cuda" if on_gpu else "cpu", "dtype": getattr(torch, dtype)}
    layer, weights = (_sonicmoe if system == "sonicmoe" else _transformers)(system, sizes, options)
    with torch.no_grad():
        for w in weights:
            w.normal_(std=w.shape[-1] ** -0.5)
    x = torch.randn(tokens, sizes.hidden, **options).requires_grad_()
    dy = torch.randn(tokens, sizes.hidden, **options) * sizes.hidden**-0.5

    def forward():
        with torch.no_grad():
            return layer(x)

    def step():
        y = layer(x)
        return y.detach(), *torch.autograd.grad(y, [x, *weights], dy)

    def memory() -> dict[str, float]:
        if not on_gpu:
            return {}
        step()  # Allocations of the first run that stay, such as cuBLAS' workspace, are not part of a step.
        before = torch.cuda.memory_allocated()
        y = layer(x)
        # x was allocated before.
        kept = torch.cuda.memory_allocated() - before - y.nbytes + x.nbytes
        del y
        torch.cuda.reset_peak_memory_stats()
        step()
        return {"kept_mib": kept / 2**20, "peak_mib": (torch.cuda.max_memory_allocated() - before) / 2**20}

    return Layer(
        forward=forward,
        step=step,
        wait=lambda _: torch.cuda.synchronize() if on_gpu else None,
        memory=memory,
        inputs=(x, *weights, dy),
        to_common=lambda *weights: weights,
        device=torch.cuda.get_device_name() if on_gpu else "cpu",
    )


def _sonicmoe(_system: str, sizes: ExpertLayer, options: dict):
    import torch
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import moe_TC_softmax_topk_layer

    router, w_gate_up, w_down = _empty_weights(sizes, options)
    stream = torch.cuda.current_stream().cuda_stream

    def layer(x):
        return moe_TC_softmax_topk_layer(
            x,
            router,
            w_gate_up.permute(1, 2, 0),
            None,
            w_down.permute(1, 2, 0),
            None,
            sizes.top_k,
            stream,
            ActivationType.SWIGLU,
            # Its inference mode, which does not write residuals.
            not torch.is_grad_enabled(),
            is_softmax_over_topk=False,
            norm_topk_probs=True,
            concat_layout=True,
        )[0]

    return layer, [router, w_gate_up, w_down]


def _transformers(system: str, sizes: ExpertLayer, options: dict):
    import torch
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=sizes.hidden,
        moe_intermediate_size=sizes.inter,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
        norm_topk_prob=True,
        experts_implementation=system,
    )
    with torch.device("meta"):
        block = Qwen3MoeSparseMoeBlock(config).to(options["dtype"])
    block.to_empty(device=options["device"])

    def layer(x):
        return block(x[None])[0]

    return layer, [block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj]


def _empty_weights(sizes: ExpertLayer, options: dict) -> list:
    import torch

    gate_up, down = (2 * sizes.inter, sizes.hidden), (sizes.hidden, sizes.inter)
    dims = ((sizes.experts, sizes.hidden), (sizes.experts, *gate_up), (sizes.experts, *down))
    return [torch.empty(dim, **options).requires_grad_() for dim in dims]
