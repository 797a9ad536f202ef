"""Counts how often a computation changes file: calls of the package's functions while a tiny model is traced or served.

    python tests/helpers/trace_hops.py      prints {road: changes}

A change is a pair of neighbouring calls of a thread in different files. A process of its own counts, since JAX traces a
function once. The road `engine` is one prompt and four new tokens, all of whose programs are compiled.
"""

import json
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from sys import monitoring

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from moe_jax import kernels, train
from moe_jax.config import Qwen3MoeConfig
from moe_jax.models.auto import from_config
from moe_jax.serving import Engine, EngineLimits, SamplingOptions

PACKAGE = str(Path(__file__).parents[2] / "moe_jax")
SIZES = dict(vocab_size=128, hidden_size=64, intermediate_size=96, moe_intermediate_size=64, num_hidden_layers=2)
EVENTS = monitoring.events.PY_START, monitoring.events.PY_RESUME
HEADS = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2)


def changes(run: Callable) -> int:
    """Returns the number of changes of file while `run` runs, in all threads."""
    files: dict[int, list[str]] = defaultdict(list)

    def note(code, _):
        if not code.co_filename.startswith(PACKAGE) or code.co_name.startswith("<"):
            return monitoring.DISABLE  # Python asks about this code no more.
        files[threading.get_ident()].append(code.co_filename)

    monitoring.use_tool_id(monitoring.PROFILER_ID, "changes of file")
    for event in EVENTS:
        monitoring.register_callback(monitoring.PROFILER_ID, event, note)
    monitoring.set_events(monitoring.PROFILER_ID, sum(EVENTS))
    try:
        run()
    finally:
        monitoring.set_events(monitoring.PROFILER_ID, 0)
        monitoring.free_tool_id(monitoring.PROFILER_ID)
    return sum(a != b for each in files.values() for a, b in zip(each, each[1:], strict=False))


def tiny_model():
    return from_config(Qwen3MoeConfig(**SIZES, **HEADS, norm_topk_prob=True, tie_word_embeddings=False), rngs=nnx.Rngs(0))


def main():
    model = tiny_model()
    graph, state = nnx.split(model)
    tokens = jnp.zeros((2, 32), jnp.int32)
    x, gate_up, down = jnp.zeros((64, 64)), jnp.zeros((8, 128, 64)), jnp.zeros((8, 64, 64))
    choices = jnp.zeros((64, 2)), jnp.zeros((64, 2), jnp.int32)
    found = {
        "decoder": changes(lambda: jax.eval_shape(lambda s, t: nnx.merge(graph, s)(t).logits, state, tokens)),
        "experts_mlp": changes(lambda: jax.eval_shape(lambda: kernels.experts_mlp(x, gate_up, down, *choices))),
    }
    optimizer = optax.adamw(1e-3)
    begun, step = train.init_state(model, optimizer), train.make_train_step(graph, optimizer)
    batch = dict(tokens=tokens, labels=tokens, loss_mask=tokens + 1, segment_ids=tokens + 1, positions=tokens + jnp.arange(32))
    found["step"] = changes(lambda: step._jit(begun).trace(begun.without_frozen, begun.frozen, batch))
    engine = Engine(model, limits=EngineLimits(max_sequences=1, max_length=64, num_pages=4), lazy=True)
    serve = lambda: engine.generate([[1, 2, 3, 4]], SamplingOptions(max_new_tokens=4))  # noqa: E731
    serve()
    found["engine"] = changes(serve)
    engine.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
