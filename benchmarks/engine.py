"""Times the serving engine for a model with random weights, and `moe_jax.generate`.

    python benchmarks/engine.py                             # Qwen3-30B-A3B in bf16: 61 GB of weights
    python benchmarks/engine.py --cases 1x128 64x1024       # sequences x tokens of their prompts
    python benchmarks/engine.py --load 200 1000 2000        # also 200 requests at once, 1000 tokens in, 2000 out
    python benchmarks/engine.py --prefix 8192 64            # also the first token of 64 tokens after 8192 cached ones
    python benchmarks/engine.py --spread --count-experts    # routing as vLLM was timed with, and the experts that a step uses
    python benchmarks/engine.py --precision fp8             # experts in FP8
    python benchmarks/engine.py --kv-dtype fp8              # keys and values in FP8
    python benchmarks/engine.py --cases 1x512 --spread --edits 16 --drafts lookup:3     # drafts from the text
    python benchmarks/engine.py --cases 16x128 --update     # also new weights for the engine: 61 GB more
    python benchmarks/engine.py --adapters 4                # also steps whose rows use four adapters of attention, or none
    python benchmarks/engine.py --cases 64x128 --grammar    # also steps of sequences that follow a JSON schema
    python benchmarks/engine.py --layers 12 --kernels       # also the kernels of a step by the profiler; GPUs alone
    python benchmarks/engine.py strict --layers 48 --cases 16 256       # bits of strict=True, and its time
    python benchmarks/engine.py replicas --replicas 1 2                # one GPU, then two with a copy of the weights each
    python benchmarks/engine.py replicas --replicas 1 --devices-per-replica 1 2     # one GPU, then two that split the experts
    python benchmarks/engine.py generate --devices 2        # moe_jax.generate; two GPUs share the experts and the prompts
    JAX_PLATFORMS=cpu python benchmarks/engine.py first --layers 48     # first call of generate, and of an engine

`steps`: a step adds one token to every sequence. Its time is the difference between generating `--long` and `--short` tokens,
over the difference of their numbers, so that prefill cancels. Times are medians of 3 calls (`generate`: of 5 groups). Decoding
is greedy, and no sequence ends early. `device` is the same step in a loop without the engine: the difference is the host's.
`prompts` is the time to the first token of all sequences, whose prompts are new. With drafts a step is the time of a token.
Nearly all drafts of random weights are wrong, so that this is the cost of a step with its drafts. An update is `engine.update`
until the device is idle again, and the token after it a request of one token. With `--spread` the likeliest token after t is
t + 1. So sequences never agree on a token, and use as many experts as chance has it. `--edits 16` is the case that drafts from
the text are for: the prompt has the answer, but for each 16th token. To count experts, the engine keeps each
token's experts, which takes some time of a step. With `--adapters 4` a further row of each case has the step in which a
fifth of the sequences uses each adapter, and a fifth none. `times` is its time over the time without adapters. With `--grammar`
further rows have the steps in which all or half of the sequences write a long text inside JSON.

`strict`: each case is a number of prompts at once, of different lengths. Each engine computes prompts in chunks of another
size. A row has the number of log-probabilities, of prompts and of drawn tokens, that differ from `strict_log_probs` of the
sequence. 0 is right.

`replicas`: each replica has the same number of clients, whose requests start together. It is on one device, or on several that
split the experts. Columns: `of_first` is the throughput over the throughput of the first row with as many clients each. `least`
is the fewest new tokens of a replica over the mean. `idle` is the share of time in which a device runs no kernel, by the
profiler; GPUs alone. `differ` is the number of requests with other tokens or log-probabilities than in the first row; with
`--strict` 0 is right.

`first`: the model has Qwen3-MoE's layers at a small width, so that a CPU can run it. Compile times are close to wide models'.
"""

import collections
import itertools
import statistics
import string
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from harness import Case, events_of_gpus, main, median_ms, median_s, microseconds_of_kernels, one_of, peak_gib, timed
from inputs import config_of, random_model_in_form
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import moe_jax
from moe_jax.adapters import LoraSettings, add_lora
from moe_jax.config import NAMED_CONFIGS
from moe_jax.generation.devices import generation_mesh
from moe_jax.layers.linear import draw_normal
from moe_jax.models.decoder import Decoder
from moe_jax.models.random_weights import random_model
from moe_jax.serving.drawing import draw_program
from moe_jax.serving.engine import Engine
from moe_jax.serving.grammar import json_grammar
from moe_jax.serving.pages import pages_of
from moe_jax.serving.request import EngineLimits, SamplingOptions
from moe_jax.serving.step import empty_rows, packed
from moe_jax.serving.strict_log_probs import strict_log_probs

TEXT = {"type": "object", "properties": {"text": {"type": "string", "minLength": 4000}}, "required": ["text"]}
TEXT_IN_JSON = dict(grammar=json_grammar(TEXT))
WORDS = string.ascii_letters + string.digits + '",:{}[].'
ONE_TOKEN = SamplingOptions(max_new_tokens=1, ignore_eos=True)


def generate(engine: Engine, prompts: list[list[int]], count: int, in_turn: tuple[dict, ...] = ({},)) -> None:
    """Continues the prompts by `count` tokens each, with further options in turn."""
    options = [SamplingOptions(max_new_tokens=count, ignore_eos=True, **some) for some in in_turn]
    engine.generate(prompts, [options[i % len(options)] for i in range(len(prompts))])


def step_ms(run, short: int, long: int, warm_up: int = 1) -> float:
    """Returns the milliseconds of a step of run(number of new tokens)."""
    seconds = [median_s(partial(run, count), 3, warm_up=warm_up) for count in (long, short)]
    return 1e3 * (seconds[0] - seconds[1]) / (long - short)


@dataclass(kw_only=True)
class Steps(Case):
    """A row for each case, and for each further measurement."""

    config: one_of(NAMED_CONFIGS) = "qwen3-30b-a3b"
    layers: int | None = None  # layers in place of all
    cases: tuple[str, ...] = ("1x128", "16x128", "64x128", "256x128")  # sequences x tokens of their prompts
    short: int = 16
    long: int = 144
    load: tuple[int, int, int] | None = None  # requests at once, tokens in, tokens out
    prefix: tuple[int, int] | None = None  # tokens of a cached prefix, and new ones after it
    spread: bool = False  # weights with which the likeliest token after t is t + 1
    count_experts: bool = False  # also how many experts a step uses, a layer
    step_tokens: int = 8192  # tokens of the largest step
    pages: int | None = None  # pages of keys and values; default: enough for the cases
    precision: Literal["bf16", "fp8"] = "bf16"  # of the experts' matmuls
    kv_dtype: Literal["model", "fp8"] = "model"  # of keys and values in pages
    drafts: str | None = None  # "module", or "lookup:N" from the text; no time for `device`
    edits: int | None = None  # with --spread: prompts have the text to come, except for each EDITS-th token
    adapters: int = 0  # adapters of attention that rows use in turn
    adapter_rank: int = 32
    grammar: bool = False  # also steps whose sequences write JSON by a schema, all or half of them
    lazy: bool = False  # compile each program when it is first needed; times of --load then hold compilation
    update: bool = False  # also time `engine.update` with the weights of another model
    kernels: bool = False  # also the time of each kernel of a step

    SMALL = dict(cases=("1x8", "3x8"), short=2, long=6, step_tokens=32)

    def start(self) -> None:
        """Refuses options that do not fit."""
        if self.kernels and self.drafts:
            raise SystemExit("--kernels are of a step without drafts: leave --drafts out")
        if self.update and self.precision == "fp8":
            raise SystemExit("--update draws its second model in bf16: leave --precision fp8 out")
        if self.count_experts and (self.drafts or NAMED_CONFIGS[self.config].experts is None):
            raise SystemExit("--count-experts needs a model with experts, and counts one token of a sequence: no --drafts")
        if self.edits is not None and not self.spread:
            raise SystemExit("--edits needs --spread, whose text is known beforehand")
        if self.spread and NAMED_CONFIGS[self.config].tie_word_embeddings:
            raise SystemExit(f"--spread: {self.config} has one matrix for embedding and head")

    def results(self):
        """Yields the rows."""
        config = config_of(self.config, small=self.small, layers=self.layers, in_fp8=self.precision == "fp8")
        config = config if self.drafts == "module" else config.without_mtp()
        dtype = jnp.float32 if self.small else jnp.bfloat16
        if self.precision == "fp8":
            model = random_model_in_form(config, "fp8")
            model.set_precision("fp8")
        else:
            model = random_model(config, jnp.dtype(dtype))
        if self.spread:
            spread_tokens(model)
        cases = [(*map(int, case.split("x")), self.long) for case in self.cases]
        most = max([sequences for sequences, _, _ in cases] + [min(self.load[0], 256) if self.load else 1])
        loads = cases + ([self.load] if self.load else []) + ([(1, sum(self.prefix), 1)] if self.prefix else [])
        limits = EngineLimits(
            max_sequences=most,
            max_tokens_per_step=self.step_tokens,
            max_length=max(prompt + new for _, prompt, new in loads),
            num_pages=self.pages or 1 + max(min(count, most) * pages_of(prompt + new) for count, prompt, new in loads),
            kv_dtype=self.kv_dtype,
            max_adapters=self.adapters,
            max_adapter_rank=self.adapter_rank,
        )
        options = dict(drafts=self.drafts or 0, keep_experts=self.count_experts, lazy=self.lazy)
        options |= dict(tokenizer=wide_tokenizer(config.vocab_size)) if self.grammar else {}
        seconds, engine = timed(partial(Engine, model, limits=limits, **options))
        print(f"{limits}\nengine ready in {seconds:.0f} s", flush=True)
        names = [str(number) for number in range(self.adapters)]
        for name in names:
            load_s, _ = timed(partial(engine.load_adapter, name, with_new_adapter(model, self.adapter_rank)))
            print(f"adapter {name} loaded in {load_s:.2f} s", flush=True)
        rng = np.random.default_rng(0)

        def random_prompts(sequences: int, tokens: int) -> list[list[int]]:
            if self.edits is None:
                return rng.integers(0, config.vocab_size, (sequences, tokens)).tolist()
            return texts_to_edit(rng, sequences, tokens, self.edits, config.vocab_size).tolist()

        for sequences, prompt, _ in cases:
            prompts = random_prompts(sequences, prompt)
            # New prompts in each call: old ones would be found in the cache.
            prefill = 1e3 * median_s(lambda shape=(sequences, prompt): generate(engine, random_prompts(*shape), 1), 3)
            step = step_ms(partial(generate, engine, prompts), self.short, self.long)
            where = sequences, prompt + self.long // 2
            device, kernels = (None, {}) if self.drafts else on_device(engine, *where, self.kernels)
            row = dict(sequences=sequences, prompt=prompt, step_ms=step, tokens_per_s=1e3 * sequences / step)
            row |= dict(device_ms=device, prompts_ms=prefill)
            yield row | (experts_in_use(engine, prompts, self.short) if self.count_experts else {})
            yield from kernel_rows(sequences, kernels)
            if names:
                in_turn = tuple(dict(adapter=name) for name in (*names, None))
                adapted = step_ms(partial(generate, engine, prompts, in_turn=in_turn), self.short, self.long)
                device, kernels = (None, {}) if self.drafts else on_device(engine, *where, self.kernels, self.adapters)
                yield dict(sequences=sequences, adapters=self.adapters, step_ms=adapted, device_ms=device, times=adapted / step)
                yield from kernel_rows(sequences, kernels)
            for share, in_turn in ((1.0, (TEXT_IN_JSON,)), (0.5, (TEXT_IN_JSON, {}))) if self.grammar else ():
                constrained = step_ms(partial(generate, engine, prompts, in_turn=in_turn), self.short, self.long)
                yield dict(sequences=sequences, with_grammar=share, step_ms=constrained, times=constrained / step)
        if self.load:
            requests, tokens, new = self.load
            prompts, before = random_prompts(requests, tokens), engine.stats()
            seconds, _ = timed(lambda: generate(engine, prompts, new))
            steps = engine.stats().num_steps - before.num_steps
            yield dict(requests=requests, seconds=seconds, output_tokens_per_s=requests * new / seconds, steps=steps)
        if self.prefix:
            cached, new = self.prefix
            prefix = random_prompts(1, cached)[0]

            def answer(before: list[int]):
                return engine.generate([before + random_prompts(1, new)[0]], ONE_TOKEN)[0][0]

            after, alone = (1e3 * median_s(partial(answer, before), 3) for before in (prefix, []))
            yield dict(cached=answer(prefix).cached_tokens, new=new, first_token_ms=after, without_prefix_ms=alone)
        if self.update:
            yield from self.updates(engine, [random_model(config, jnp.dtype(dtype), seed=1), model])
        row, stats = dict(peak_gib=peak_gib()), engine.stats()
        yield row | (dict(drafts=stats.num_drafted, accepted=stats.acceptance_rate) if self.drafts else {})
        engine.close()

    def updates(self, engine: Engine, models: list):
        """Yields the time of some updates, and of a token after each. The last model has the engine's weights."""

        def update(model) -> None:
            engine.update(model)
            jax.block_until_ready(engine._loop.device._weights)

        def token() -> None:
            engine.generate([[1, 2, 3]], ONE_TOKEN)

        token()
        for model in models * 3:
            yield dict(update_ms=1e3 * timed(partial(update, model))[0], token_after_it_ms=1e3 * timed(token)[0])


def with_new_adapter(model: Decoder, rank: int) -> Decoder:
    """Returns the model, whose arrays it shares, with an adapter of attention."""
    adapted = nnx.merge(*nnx.split(model))
    add_lora(adapted, LoraSettings(rank=rank, targets=("attention",)), rngs=nnx.Rngs(0))
    return adapted


def kernel_rows(sequences: int, kernels: collections.Counter[str]):
    """Yields a row for each of the longest kernels."""
    for name, us in sorted(kernels.items(), key=lambda item: -item[1])[:16]:
        yield dict(sequences=sequences, kernel_us=us, kernel=name)


def wide_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of bytes and of short words, as many tokens as a model has."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = itertools.chain(alphabet, *(map("".join, itertools.product(WORDS, repeat=length)) for length in (2, 3)))
    tokens = itertools.islice(dict.fromkeys(words), vocab_size - 1)
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def spread_tokens(model: Decoder) -> None:
    """Draws the embedding from N(0, 1), and makes its rows, moved on by one, the rows of the head."""
    weight = model.embed_tokens.weight
    draw = jax.jit(lambda: draw_normal(jax.random.key(1), weight.shape, 1.0, weight.dtype), out_shardings=weight[...].sharding)
    embedding = draw()
    weight.set_value(embedding)
    model.lm_head.weight.set_value(jnp.roll(embedding, 1, axis=0))


def texts_to_edit(rng: np.random.Generator, sequences: int, tokens: int, edits: int, vocab_size: int) -> np.ndarray:
    """Returns prompts of a text and its first two tokens: a spread model continues by the text, without the changes in it."""
    start = rng.integers(0, vocab_size, (sequences, 1))
    text = (start + np.arange(tokens - 2)) % vocab_size
    text[:, edits - 1 :: edits] = rng.integers(0, vocab_size, text[:, edits - 1 :: edits].shape)
    return np.concatenate([text, text[:, :2]], axis=1)


def experts_in_use(engine: Engine, prompts: list[list[int]], new: int) -> dict:
    """Returns the number of experts that the tokens of a step are sent to, the mean of all layers and steps."""
    options = SamplingOptions(max_new_tokens=new, ignore_eos=True, return_experts=True)
    completions = [completion for (completion,) in engine.generate(prompts, options)]
    # The last token of a sequence is drawn, and not computed: one position less than new tokens.
    decoded = np.stack([completion.experts[len(prompts[0]) :] for completion in completions], axis=2)
    used = np.mean([len(np.unique(of_layer)) for of_step in decoded for of_layer in of_step])
    tokens = np.array([[prompt[-1], *completion.tokens] for prompt, completion in zip(prompts, completions, strict=True)])
    next_token = np.mean((tokens[:, 1:] - tokens[:, :-1]) % engine.config.vocab_size == 1)
    return dict(experts_in_use=float(used), next_tokens=float(next_token))


def on_device(
    engine: Engine, sequences: int, position: int, kernels: bool, adapters: int = 0
) -> tuple[float, collections.Counter[str]]:
    """Returns the milliseconds of a decoding step on the device, and the microseconds of its kernels if they are wanted.

    Steps are launched one after the other, without reading tokens. Rows use the adapters in turn, if there are any, or none.
    """
    device = engine._loop.device
    engine.pause()
    wanted = [shape for shape in device._decode_shapes if shape.adapted == bool(adapters)]
    shape = next(shape for shape in wanted if shape.decodes >= sequences)
    rows = empty_rows(shape)
    if adapters:
        rows.adapters[:] = np.arange(len(rows.adapters)) % (adapters + 1) - 1
    rows.decode_slots[:sequences] = np.arange(sequences)
    rows.decode_positions[:] = position
    pages = np.arange(sequences * pages_of(position + 1), dtype=np.int32).reshape(sequences, -1) + 1
    table = device.state.page_table.at[:sequences, : pages.shape[1]].set(pages)
    device.state = device.state._replace(page_table=table)
    upload = jax.device_put(packed([rows]))
    draw = draw_program("greedy")

    def launch() -> None:
        program, over = device._programs[shape]
        state, output = program([*device._weights, *device._table], device.state, upload, over)
        if over is not None:
            device._programs[shape] = program, output
        last_token, *_ = draw(output, device.slots.options, state.last_token, None)
        device.state = state._replace(last_token=last_token)

    times = []
    for _ in range(4):
        began = time.perf_counter()
        for _ in range(20):
            launch()
        jax.block_until_ready(device.state)
        times.append((time.perf_counter() - began) / 20)
    found = microseconds_of_kernels(launch, lambda: device.state) if kernels else collections.Counter()
    engine.resume()
    return 1e3 * statistics.median(times[1:]), found


@dataclass(kw_only=True)
class Strict(Case):
    """A row for each engine and case, of Qwen3-30B-A3B's layers."""

    layers: int = 4
    cases: tuple[int, ...] = (1, 16, 64, 256)  # prompts at once
    chunks: tuple[int, ...] = (512, 2048)  # tokens of the largest step
    prompt: int = 700  # tokens of the longest prompt
    short: int = 16
    long: int = 144
    kv_dtype: Literal["model", "fp8"] = "model"  # of keys and values in pages

    SMALL = dict(layers=1, cases=(1,), chunks=(16,), prompt=20, short=2, long=3)

    def results(self):
        """Yields the rows; a failure if bits of a strict engine differ."""
        config = config_of("qwen3-30b-a3b", small=self.small, layers=self.layers).without_mtp()
        if self.small:  # The smallest sizes of the strict kernels.
            sizes = dict(vocab_size=128, hidden_size=128, head_dim=128, num_experts=128, moe_intermediate_size=128)
            config = replace(config, **sizes)
        model, longest = random_model(config, jnp.bfloat16), self.prompt + self.long
        # Weights are arguments: constants would take minutes to compile.
        graph, weights = nnx.graphdef(model), nnx.state(model)
        run = jax.jit(lambda weights, *arrays: strict_log_probs(nnx.merge(graph, weights), *arrays, kv_dtype=self.kv_dtype))
        lengths = np.random.default_rng(0).integers(1, self.prompt + 1, max(self.cases))
        prompts = [np.random.default_rng(i).integers(0, config.vocab_size, length).tolist() for i, length in enumerate(lengths)]
        for step_tokens in self.chunks:
            for strict in (False, True):
                limits = EngineLimits(
                    max_sequences=max(self.cases),
                    max_tokens_per_step=step_tokens,
                    max_length=longest,
                    num_pages=1 + max(self.cases) * pages_of(longest),
                    kv_dtype=self.kv_dtype,
                )
                engine = Engine(model, limits=limits, strict=strict)
                for count in self.cases:
                    row = dict(strict=strict, step_tokens=step_tokens, prompts=count)
                    row |= self.wrong_bits(engine, partial(run, weights), prompts[:count])
                    ms = step_ms(partial(generate, engine, prompts[:count]), self.short, self.long, warm_up=0)
                    row |= {"step_ms": ms}
                    yield row | ({"failure": "bits differ"} if strict and row["differ"] else {})
                engine.close()

    def wrong_bits(self, engine: Engine, whole, prompts: list[list[int]]) -> dict:
        """Returns the number of log-probabilities that differ from whole sequences', and the largest difference."""
        options = SamplingOptions(
            max_new_tokens=self.short, ignore_eos=True, temperature=1.0, seed=0, logprobs=0, prompt_logprobs=0
        )
        differ, total, largest, longest = 0, 0, 0.0, self.prompt + self.short
        for prompt, (one,) in zip(prompts, engine.generate(prompts, options), strict=True):
            tokens = prompt + one.tokens
            padded = np.zeros((1, longest), np.int32)
            padded[0, : len(tokens)] = tokens
            expected = whole(padded, (np.arange(longest)[None] < len(tokens)).astype(np.int32))
            expected = np.asarray(expected)[0, : len(tokens) - 1]
            scores = zip(one.prompt_logprobs[1:], prompt[1:], strict=True)
            found = np.float32([of_place[token] for of_place, token in scores] + one.logprobs)
            differ, total = differ + int((found != expected).sum()), total + len(found)
            largest = max(largest, float(np.abs(found - expected).max()))
        return dict(differ=differ, of=total, at_most=largest)


@dataclass(kw_only=True)
class Replicated(Case):
    """A row for each number of devices of a replica, of replicas, and of clients for each replica."""

    config: one_of(NAMED_CONFIGS) = "qwen3-30b-a3b"
    layers: int | None = 4
    replicas: tuple[int, ...] = (1, 2)
    devices_per_replica: tuple[int, ...] = (1,)
    clients: tuple[int, ...] = (64, 256)  # for each replica
    prompt: int = 128
    short: int = 16
    long: int = 144
    step_tokens: int = 2048  # tokens of the largest step
    strict: bool = False
    lazy: bool = True  # compile each program when it is first needed, one after the other
    spread: bool = False  # weights with which the likeliest token after t is t + 1

    SMALL = dict(layers=2, replicas=(1,), clients=(2,), prompt=8, short=2, long=6, step_tokens=32)

    def results(self):
        """Yields the rows."""
        config = config_of(self.config, small=self.small, layers=self.layers).without_mtp()
        rng, most = np.random.default_rng(0), max(self.clients)
        prompts = rng.integers(0, config.vocab_size, (most * max(self.replicas), self.prompt)).tolist()
        first: dict[int, tuple[float, list]] = {}
        for devices in self.devices_per_replica:
            mesh = generation_mesh(jax.devices()[:devices], config) if devices > 1 else None
            model = random_model(config, jnp.dtype(jnp.float32 if self.small else jnp.bfloat16), mesh=mesh)
            if self.spread:
                spread_tokens(model)
            for replicas in self.replicas:
                yield from self.rows_of(model, devices, replicas, prompts, first)
            # Else both models would be in memory while the next one is made.
            for array in jax.tree.leaves(nnx.state(model)):
                array.delete()

    def rows_of(self, model: Decoder, devices: int, replicas: int, prompts: list, first: dict[int, tuple[float, list]]):
        """Yields the rows of an engine; `first` has tokens per second and a replica, and answers, of the first engine."""
        most, length = -(-max(self.clients) // devices), self.prompt + self.long
        sizes = dict(max_sequences=most, max_tokens_per_step=self.step_tokens, max_length=length)
        limits = EngineLimits(**sizes, num_pages=1 + most * pages_of(length), replicas=replicas)
        seconds, engine = timed(partial(Engine, model, limits=limits, strict=self.strict, lazy=self.lazy))
        print(f"{replicas} replicas of {devices} devices ready in {seconds:.0f} s", flush=True)
        for clients in self.clients:
            run, before = partial(generate, engine, prompts[: clients * replicas]), tokens_of_devices(engine)
            step = step_ms(run, self.short, self.long)
            new = tokens_of_devices(engine) - before
            per_second, drawn = 1e3 * clients * replicas / step, self.drawn(engine, prompts[:clients])
            at_first, expected = first.setdefault(clients, (per_second / replicas, drawn))
            differ = sum(one != other for one, other in zip(drawn, expected, strict=True))
            row = dict(devices=devices, replicas=replicas, clients=clients, step_ms=step, tokens_per_s=per_second)
            row |= dict(of_first=per_second / at_first, least=float(new.min() / new.mean()), differ=differ)
            row["idle"] = idle_shares(partial(run, self.short))
            yield row | ({"failure": "bits differ"} if self.strict and differ else {})
        engine.close()

    def drawn(self, engine: Engine, prompts: list[list[int]]) -> list:
        """Returns the tokens and log-probabilities of each prompt's answer."""
        options = SamplingOptions(max_new_tokens=self.short, ignore_eos=True, temperature=1.0, seed=0, logprobs=0)
        return [(one.tokens, one.logprobs) for (one,) in engine.generate(prompts, options)]


def tokens_of_devices(engine: Engine) -> np.ndarray:
    """Returns the number of new tokens of each replica so far."""
    return np.array([stats.num_tokens for stats in engine.stats_of_devices().values() or [engine.stats()]])


def idle_shares(run: Callable) -> list[float] | None:
    """Returns the share of a call's time in which each GPU runs no kernel; None without GPUs."""
    shares = []
    for events in events_of_gpus(run):
        spans = sorted((event.start_ns, event.start_ns + event.duration_ns) for event in events)
        if spans:
            ends = np.maximum.accumulate([end for _, end in spans])
            gaps = np.maximum([start for start, _ in spans[1:]] - ends[:-1], 0).sum()
            shares.append(float(gaps / (ends[-1] - spans[0][0])))
    return shares or None


@dataclass(kw_only=True)
class Generate(Case):
    """A row for each number of prompts, continued by `moe_jax.generate`."""

    config: one_of(NAMED_CONFIGS) = "qwen3-30b-a3b"
    prompts: tuple[int, ...] = (1, 16, 64)
    prompt_tokens: int = 128
    short: int = 16
    long: int = 144
    devices: int = 1  # GPUs that share the experts and the prompts

    SMALL = dict(prompts=(2,), prompt_tokens=8, short=2, long=4)

    def results(self):
        """Yields the rows."""
        config = config_of(self.config, small=self.small)
        mesh = generation_mesh(jax.devices()[: self.devices], config)
        model = random_model(config, jnp.dtype(jnp.float32 if self.small else jnp.bfloat16), mesh=mesh)
        for prompts in self.prompts:
            tokens = np.random.default_rng(0).integers(0, config.vocab_size, (prompts, self.prompt_tokens)).tolist()
            calls = (partial(moe_jax.generate, model, tokens, max_new_tokens=count) for count in (self.short, self.long))
            short, long = (median_ms(call, (), 1) for call in calls)
            step = (long - short) / (self.long - self.short)
            yield dict(prompts=prompts, step_ms=step, tokens_per_s=1e3 * prompts / step, short_ms=short, peak_gib=peak_gib())


@dataclass(kw_only=True)
class First(Case):
    """A row for each number of layers: seconds of the first call and of a later one."""

    layers: tuple[int, ...] = (4,)
    new_tokens: int = 64

    SMALL = dict(layers=(2,), new_tokens=4)

    def results(self):
        """Yields the rows."""
        prompt = list(range(1, 51))
        # One decode program, and the fewest programs for chunks: with and without decoding rows.
        limits = EngineLimits(
            max_sequences=1, max_tokens_per_step=128, max_chunks_per_step=1, max_length=128, num_pages=3, max_waiting=1
        )
        for layers in self.layers:
            model = random_model(replace(config_of("qwen3-30b-a3b", small=True), num_hidden_layers=layers), jnp.float32)
            call = partial(moe_jax.generate, model, prompt, max_new_tokens=self.new_tokens)
            (first, tokens), (later, _) = timed(call), timed(call)
            start, engine = timed(partial(Engine, model, limits=limits))
            options = SamplingOptions(max_new_tokens=self.new_tokens, ignore_eos=True)
            of_engine, ((completion,),) = timed(partial(engine.generate, [prompt], options))
            engine.close()
            row = dict(layers=layers, generate_first_s=first, generate_later_s=later, engine_start_s=start)
            row |= dict(engine_call_s=of_engine)
            yield row | ({} if completion.tokens == tokens else {"failure": "generate and the engine draw other tokens"})


CASES = {"steps": Steps, "strict": Strict, "replicas": Replicated, "generate": Generate, "first": First}

if __name__ == "__main__":
    main(__doc__, CASES)
