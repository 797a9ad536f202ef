"""Times the serving engine for a model with random weights: a step by number of sequences, and many requests at once.

    python benchmarks/engine.py                             # Qwen3-30B-A3B in bf16: 61 GB of weights
    python benchmarks/engine.py --cases 1x128 64x1024       # sequences x tokens of their prompts
    python benchmarks/engine.py --load 200 1000 2000        # also 200 requests at once, 1000 tokens in, 2000 out
    python benchmarks/engine.py --prefix 8192 64            # also the first token of 64 tokens behind 8192 cached ones
    python benchmarks/engine.py --spread --count-experts    # routing as vLLM was timed with, and the experts that a step uses
    python benchmarks/engine.py --precision fp8             # experts in FP8
    python benchmarks/engine.py --cases 16x128 --update     # also new weights for the engine: 61 GB more
    python benchmarks/engine.py --lives 3 --load 10000 16 4 # only memory: 3 engines in a row, each with 10,000 requests
    python benchmarks/engine.py --small                     # sizes for a CPU, in f32, as a smoke test

A step gives one more token to every sequence. Its time is the difference between generating `--long` and `--short` tokens, over
the difference of their numbers, so that prefill cancels. Times are medians of 3 calls. Decoding is greedy, and no sequence ends
early. `device` is the same step in a loop without the engine: the difference is the host's. `prompts` is the time to the first
token of all sequences, whose prompts are new. `generate` is `moe_jax.generate`. With drafts a step is the time of a token.
Nearly all drafts of random weights are wrong, so that this is the cost of a step with its drafts. An update is `engine.update`
until the device is idle again, and the token behind it a request of one token.

With `--spread` the likeliest token after t is t + 1. So sequences never agree on a token, and use as many experts as chance
gives. To count experts, the engine keeps those of each token, which takes some time of a step.
"""

import argparse
import re
import statistics
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from frozen_forms import random_model_in_form

import moe_jax
from moe_jax.config import NAMED_CONFIGS
from moe_jax.layers.linear import draw_normal
from moe_jax.models.decoder import Decoder
from moe_jax.models.random_weights import random_model
from moe_jax.serving.drawing import draw_program
from moe_jax.serving.engine import Engine
from moe_jax.serving.pages import pages_of
from moe_jax.serving.request import EngineLimits, SamplingOptions
from moe_jax.serving.step import empty_rows, packed

SMALL = dict(num_hidden_layers=2, hidden_size=64, num_experts=8, moe_intermediate_size=64, vocab_size=512)
SMALL_IN_FP8 = SMALL | dict(hidden_size=128, moe_intermediate_size=128)


def main() -> None:
    """Prints a row for each case, and one for the load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=tuple(NAMED_CONFIGS), default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, help="layers in place of all")
    parser.add_argument("--cases", nargs="+", metavar="SEQUENCESxTOKENS", default=["1x128", "16x128", "64x128", "256x128"])
    parser.add_argument("--short", type=int, default=16)
    parser.add_argument("--long", type=int, default=144)
    parser.add_argument("--load", type=int, nargs=3, metavar=("REQUESTS", "IN", "OUT"))
    parser.add_argument(
        "--prefix", type=int, nargs=2, metavar=("CACHED", "NEW"), help="tokens of a prompt behind a cached prefix"
    )
    parser.add_argument("--spread", action="store_true", help="weights with which the likeliest token after t is t + 1")
    parser.add_argument("--count-experts", action="store_true", help="also print how many experts a step uses, a layer")
    parser.add_argument("--step-tokens", type=int, help="tokens of the largest step, in place of 8192 (on a CPU 256)")
    parser.add_argument("--pages", type=int, help="pages of keys and values; default: as many as the cases need")
    parser.add_argument("--precision", choices=("bf16", "fp8"), default="bf16", help="of the experts' matmuls")
    parser.add_argument("--drafts", action="store_true", help="with drafts of the model's module; no time for `device`")
    parser.add_argument("--update", action="store_true", help="also time `engine.update` with the weights of another model")
    parser.add_argument("--lives", type=int, metavar="ENGINES", help="instead of times, the memory of engines in a row")
    parser.add_argument("--with-generate", action="store_true", help="also time moe_jax.generate")
    parser.add_argument("--small", action="store_true", help="sizes of Qwen3-MoE for a CPU, in f32 or FP8, as a smoke test")
    args = parser.parse_args()
    if args.update and args.precision == "fp8":
        parser.error("--update draws its second model in bf16: leave --precision fp8 out")
    if args.count_experts and args.drafts:
        parser.error("--count-experts counts one token of a sequence: leave --drafts out")
    if args.count_experts and NAMED_CONFIGS[args.config].experts is None and not args.small:
        parser.error(f"--count-experts: {args.config} has no experts")
    config = NAMED_CONFIGS["qwen3-30b-a3b" if args.small else args.config]
    dtype = jnp.dtype(jnp.float32 if args.small else jnp.bfloat16)
    config = replace(config, **(SMALL_IN_FP8 if args.precision == "fp8" else SMALL)) if args.small else config
    config = replace(config, num_hidden_layers=args.layers) if args.layers else config
    config = config if args.drafts else config.without_mtp()
    if args.spread and config.tie_word_embeddings:
        parser.error(f"--spread: {args.config} has one matrix for embedding and head")
    if args.precision == "fp8":
        model, name = random_model_in_form(config, "fp8"), "experts in fp8"
        model.set_precision("fp8")
    else:
        model, name = random_model(config, dtype), dtype.name
    if args.spread:
        spread_tokens(model)
        name += ", spread"
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {'small' if args.small else args.config}, {name}")
    cases = [(*map(int, case.split("x")), args.long) for case in args.cases]
    most = max([sequences for sequences, _, _ in cases] + [min(args.load[0], 256) if args.load else 1])
    loads = [*cases, tuple(args.load)] if args.load else cases
    loads = [*loads, (1, sum(args.prefix), 1)] if args.prefix else loads
    limits = EngineLimits(
        max_sequences=most,
        max_tokens_per_step=args.step_tokens or (256 if args.small else 8192),
        max_length=max(prompt + new for _, prompt, new in loads),
        num_pages=args.pages or 1 + max(min(count, most) * pages_of(prompt + new) for count, prompt, new in loads),
    )
    if args.lives:
        print_memory(model, limits, args.lives, args.load or (1, 128, 16))
        return
    began = time.perf_counter()
    engine = Engine(model, limits=limits, drafts=int(args.drafts), keep_experts=args.count_experts)
    print(f"{limits}\nengine ready in {time.perf_counter() - began:.0f} s", flush=True)
    rng = np.random.default_rng(0)
    titles = {"sequences": 10, "prompt": 8, "a step": 12, "tokens/s": 10, "device": 12, "prompts": 12, "generate": 12}
    print("".join(f"{title:>{width}}" for title, width in titles.items()))
    for sequences, prompt_tokens, _ in cases:
        prompts = rng.integers(0, config.vocab_size, (sequences, prompt_tokens)).tolist()
        time_steps(engine, model if args.with_generate else None, rng, prompts, args.short, args.long)
        if args.count_experts:
            print_experts(engine, prompts, args.short)
    if args.load:
        time_load(engine, rng.integers(0, config.vocab_size, args.load[:2]).tolist(), args.load[2])
    if args.prefix:
        time_prefix(engine, rng, *args.prefix)
    if args.update:
        time_updates(engine, [random_model(config, dtype, seed=1), model])
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**30
    print(f"peak {peak:.2f} GiB")
    if args.drafts:
        print(f"{engine.stats().num_drafted} drafts, {engine.stats().acceptance_rate:.1%} accepted")
    engine.close()


def time_steps(engine: Engine, model, rng: np.random.Generator, prompts: list[list[int]], short: int, long: int) -> None:
    """Prints the row of these prompts."""
    one_token = SamplingOptions(max_new_tokens=1, ignore_eos=True)

    def of_engine(count: int) -> None:
        engine.generate(prompts, SamplingOptions(max_new_tokens=count, ignore_eos=True))

    def a_step(run) -> float:
        return 1e3 * (median_s(run, long) - median_s(run, short)) / (long - short)

    def new_prompts(shape: tuple[int, ...]) -> None:
        # Old ones would be found in the cache.
        engine.generate(rng.integers(0, engine.config.vocab_size, shape).tolist(), one_token)

    prefill = 1e3 * median_s(new_prompts, np.shape(prompts))
    step, drafts = a_step(of_engine), engine._loop.queues[0].drafts
    device = float("nan") if drafts else device_ms(engine, len(prompts), len(prompts[0]) + long // 2)
    generate = a_step(lambda n: moe_jax.generate(model, prompts, max_new_tokens=n)) if model is not None else float("nan")
    rate = 1e3 * len(prompts) / step
    times = f"{device:>9.3f} ms{prefill:>9.1f} ms{generate:>9.3f} ms"
    print(f"{len(prompts):>10}{len(prompts[0]):>8}{step:>9.3f} ms{rate:>10.0f}{times}", flush=True)


def print_memory(model: Decoder, limits: EngineLimits, engines: int, load: tuple[int, int, int]) -> None:
    """Prints the device's and the process's memory before each of some engines, in use, and after it is closed."""
    requests, prompt_tokens, new = load
    rng = np.random.default_rng(0)

    def row(moment: str) -> None:
        arrays = sum(array.nbytes for array in jax.live_arrays())
        in_use = (jax.local_devices()[0].memory_stats() or {}).get("bytes_in_use", arrays)
        resident = int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024
        print(f"{moment:>12}{in_use / 2**20:>12.1f} MiB on the device{resident / 2**20:>10.0f} MiB of the process", flush=True)

    row("before")
    for _ in range(engines):
        began = time.perf_counter()
        engine = Engine(model, limits=limits)
        row(f"{time.perf_counter() - began:.0f} s start")
        prompts = rng.integers(0, model.config.vocab_size, (requests, prompt_tokens)).tolist()
        engine.generate(prompts, SamplingOptions(max_new_tokens=new, ignore_eos=True))
        assert engine.stats().running == engine.stats().waiting == 0
        row("in use")
        engine.close()
        row("closed")


def spread_tokens(model: Decoder) -> None:
    """Draws the embedding from N(0, 1), and makes its rows, moved on by one, the rows of the head."""
    weight = model.embed_tokens.weight
    embedding = jax.jit(lambda: draw_normal(jax.random.key(1), weight.shape, 1.0, weight.dtype))()
    weight.set_value(embedding)
    model.lm_head.weight.set_value(jnp.roll(embedding, 1, axis=0))


def print_experts(engine: Engine, prompts: list[list[int]], new: int) -> None:
    """Prints the number of experts that the tokens of a step are sent to, the mean of all layers and steps."""
    options = SamplingOptions(max_new_tokens=new, ignore_eos=True, return_experts=True)
    completions = [completion for (completion,) in engine.generate(prompts, options)]
    # The last token of a sequence is drawn, and not computed: one position less than new tokens.
    decoded = np.stack([completion.experts[len(prompts[0]) :] for completion in completions], axis=2)
    used = np.mean([len(np.unique(of_layer)) for of_step in decoded for of_layer in of_step])
    tokens = np.array([[prompt[-1], *completion.tokens] for prompt, completion in zip(prompts, completions, strict=True)])
    next_token = np.mean((tokens[:, 1:] - tokens[:, :-1]) % engine.config.vocab_size == 1)
    print(f"{used:.1f} of {engine.config.experts.num_experts} experts in use, a layer; t + 1 came after t {next_token:.1%}")


def time_load(engine: Engine, prompts: list[list[int]], new: int) -> None:
    """Prints the throughput of all requests at once."""
    before = engine.stats()
    began = time.perf_counter()
    engine.generate(prompts, SamplingOptions(max_new_tokens=new, ignore_eos=True))
    seconds = time.perf_counter() - began
    steps = engine.stats().num_steps - before.num_steps
    print(f"{len(prompts)} requests: {seconds:.1f} s, {len(prompts) * new / seconds:.0f} output tokens/s, {steps} steps")


def time_prefix(engine: Engine, rng: np.random.Generator, cached: int, new: int) -> None:
    """Prints the time to the first token of new tokens behind a cached prefix, and of as many tokens alone."""
    vocab_size = engine.config.vocab_size
    prefix, one_token = rng.integers(0, vocab_size, cached).tolist(), SamplingOptions(max_new_tokens=1, ignore_eos=True)

    def answer(before: list[int]):
        ((completion,),) = engine.generate([before + rng.integers(0, vocab_size, new).tolist()], one_token)
        return completion

    behind, alone = (1e3 * median_s(answer, before) for before in (prefix, []))
    found = answer(prefix).cached_tokens
    print(f"first token of {new} tokens behind {found} cached ones {behind:.1f} ms, of {new} tokens alone {alone:.1f} ms")


def time_updates(engine: Engine, models: list) -> None:
    """Prints the time of some updates, and of a token behind each. The weights of the last model must be the engine's."""
    prompts, one_token = [[1, 2, 3]], SamplingOptions(max_new_tokens=1, ignore_eos=True)

    def timed(run) -> float:
        began = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - began)

    def update(model) -> None:
        engine.update(model)
        jax.block_until_ready(engine._loop.device._weights)

    timed(lambda: engine.generate(prompts, one_token))
    for model in models * 3:
        took, token = timed(lambda model=model: update(model)), timed(lambda: engine.generate(prompts, one_token))
        print(f"update {took:.1f} ms, a token behind it {token:.1f} ms", flush=True)


def device_ms(engine: Engine, sequences: int, position: int) -> float:
    """Returns the milliseconds of a decoding step on the device: launches one after the other, without reading tokens."""
    device = engine._loop.device
    engine.pause()
    shape = next(shape for shape in device._decode_shapes if shape.decodes >= sequences)
    rows = empty_rows(shape)
    rows.decode_slots[:sequences] = np.arange(sequences)
    rows.decode_positions[:] = position
    pages = np.arange(sequences * pages_of(position + 1), dtype=np.int32).reshape(sequences, -1) + 1
    table = device.state.page_table.at[:sequences, : pages.shape[1]].set(pages)
    device.state = device.state._replace(page_table=table)
    upload = jax.device_put(packed([rows]))
    draw = draw_program("greedy")

    def launch() -> None:
        state, output = device._programs[shape](device._weights, device.state, upload)
        last_token, *_ = draw(output, device.slots.options, state.last_token, None)
        device.state = state._replace(last_token=last_token)

    times = []
    for _ in range(4):
        began = time.perf_counter()
        for _ in range(20):
            launch()
        jax.block_until_ready(device.state)
        times.append((time.perf_counter() - began) / 20)
    engine.resume()
    return 1e3 * statistics.median(times[1:])


def median_s(run, argument) -> float:
    """Returns the median seconds of three calls, after one that is not counted."""
    run(argument)
    times = []
    for _ in range(3):
        began = time.perf_counter()
        run(argument)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


if __name__ == "__main__":
    main()
