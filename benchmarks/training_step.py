"""Times a whole training step (forward, backward, AdamW) of a model with random weights over all GPUs of a job.

    python benchmarks/training_step.py --mesh expert=4 --rows 4 --output step.jsonl
    python benchmarks/training_step.py --rows 8 --lora-rank 32 --frozen-form nf4       # adapters, with experts in 4 bits
    moe-jax launch -- python benchmarks/training_step.py --mesh expert=4 --rows 4      # one process for each GPU
    python benchmarks/training_step.py --layers 8 --rows 8 --routings balanced --kernels   # where the time is; GPUs alone
    python benchmarks/training_step.py dpo --layers 4 8                                # DPO compared with fine-tuning
    XLA_FLAGS=--xla_force_host_platform_device_count=4 python benchmarks/training_step.py --small --mesh fsdp=2 expert=2  # CPU

TFLOP/s are model FLOPs of one GPU (`moe_jax.cost.flops`: recomputation does not count). "of ceiling" compares them with a dense
bf16 matmul of 8192^3 on one GPU in the same process. Attention counts the keys that a token attends to: half a row on average,
fewer in packed rows. Routing "own" is the choice of a router with random weights. "rebalanced" is the same after experts were
moved according to a step's loads. "balanced" gives every expert the same load. A time is the median of `--steps` steps after a
first one.

`dpo`: rows hold a pair each, both answers of half a row, in fine-tuning as two documents. All train adapters. A ratio is
(DPO step) / (two steps of fine-tuning of half the rows each). "stored" is a DPO step whose batch holds the reference's
log-probabilities. With two numbers of layers a line through both gives the times of all layers of the config: a prediction.
"""

import gc
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from harness import GIB, Case, main, microseconds_of_kernels, one_of, peak_gib
from inputs import FORMS, config_of, random_model_in_form, random_rows

from moe_jax.adapters import LoraSettings, add_lora
from moe_jax.config import NAMED_CONFIGS, ModelConfig
from moe_jax.cost.flops import num_parameters, training_flops_per_token
from moe_jax.models.random_weights import random_model
from moe_jax.models.remat import KEPT_PARTS
from moe_jax.parallel import ContextParallel, ExpertParallel, Parallelism, default_hops, initialize_processes, make_mesh
from moe_jax.parallel.choices import Hops, PipeSchedule
from moe_jax.parallel.expert.placement import device_load
from moe_jax.preferences import Preference, PreferenceSettings
from moe_jax.train import LossWeights, NextToken, init_state, make_optimizer, make_train_step, put_batch
from moe_jax.train.compiled_step import StepRemat
from moe_jax.train.rebalance import rebalance


@dataclass(kw_only=True)
class Step(Case):
    """A row for each routing."""

    config: one_of(NAMED_CONFIGS) = "qwen3-30b-a3b"
    layers: int | None = None  # number of layers; default: all
    mesh: tuple[str, ...] = ("fsdp=1",)  # AXIS=N: axes pipe, data, fsdp, expert, context
    pipe_chunks: int = 1  # option of Parallelism
    pipe_schedule: one_of(get_args(PipeSchedule)) = "uniform"  # option of Parallelism
    transport: str | None = None  # of ExpertParallel; default: its own choice
    capacity_factor: float = ExpertParallel.capacity_factor  # option of ExpertParallel
    shadow_experts: int = 0  # option of ExpertParallel
    shard_optimizer: bool = False  # option of Parallelism
    context_method: Literal["ring", "all_gather", "ulysses"] = "ring"
    hops: Hops | None = None  # option of Parallelism; default: copies if the devices allow them
    seq: int = 4096
    rows: int = 4  # rows of the whole batch
    gradient_accumulation: int = 1  # micro-batches of a step
    overlap: bool | None = None  # option overlap_micro_batches of Parallelism; default: its own
    packed: bool = False  # rows of several documents; default: one document each
    param_dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of parameters; masters are f32
    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    precision: Literal["bf16", "fp8", "fp8_kept"] = "bf16"  # of the experts' matmuls
    tokens_in_fp8: bool = False  # option of ExpertParallel; needs a precision in FP8
    lora_rank: int | None = None  # train adapters of this rank; the weights, bfloat16, are frozen
    lora_expert_rank: int | None = None  # the rank of each expert; default: that of LoraSettings
    frozen_form: one_of(FORMS) = "whole"  # form of the weights that --lora-rank freezes; one device
    remat: bool = True
    keep: str = "0"  # with remat, the number of last layers that keep their residuals, or "auto"
    keep_parts: tuple[one_of(KEPT_PARTS), ...] = ()  # with remat, the parts that the other layers keep
    offload: bool = False  # keep the residuals of remat in host memory
    routings: tuple[Literal["balanced", "own", "rebalanced"], ...] = ("balanced", "own")
    steps: int = 5
    kernels: bool = False  # also the time of each kernel of a step

    SMALL = dict(seq=64, steps=1)

    def start(self) -> None:
        """Joins the processes of the job."""
        initialize_processes()

    @property
    def kept(self) -> StepRemat:
        """The option `remat` of the step."""
        if self.offload or not self.remat:
            return "offload" if self.offload else False
        return self.keep if self.keep == "auto" else ",".join((self.keep, *self.keep_parts))

    def results(self):
        """Yields time, rates and memory of a step."""
        config = config_of(self.config, small=self.small, layers=self.layers, in_fp8=self.precision != "bf16")
        sizes = {name: int(size) for name, size in (axis.split("=") for axis in self.mesh)}
        devices = jax.devices()[: int(np.prod(list(sizes.values())))]
        mesh = make_mesh(**sizes, devices=devices)
        parallelism = Parallelism(
            mesh,
            ExpertParallel(
                transport=self.transport,
                capacity_factor=self.capacity_factor,
                shadow_experts=self.shadow_experts,
                tokens_in_fp8=self.tokens_in_fp8,
            ),
            ContextParallel(method=self.context_method),
            self.hops or default_hops(mesh),
            overlap_micro_batches=self.overlap,
            shard_optimizer=self.shard_optimizer,
            pipe_chunks=self.pipe_chunks,
            pipe_schedule=self.pipe_schedule,
        )
        ceiling = measure_ceiling(256 if self.small else 8192)
        if jax.process_index() == 0:
            model = (
                f"{len(devices)} devices, {config.num_hidden_layers} layers, {num_parameters(config) / 1e9:.2f} B parameters"
            )
            print(f"{model}, {self.rows} x {self.seq} tokens, hops by {parallelism.hops}, ceiling {ceiling:.0f} TFLOP/s")
        for routing in self.routings:
            row, kernels = self.measure(config, parallelism, routing)
            gc.collect()
            yield {"routing": routing} | row | {"of_ceiling": row["tflops_per_gpu"] / ceiling}
            for name, us in kernels.most_common(40):
                yield {"routing": routing, "kernel_us": us, "kernel": name}

    def measure(self, config, parallelism: Parallelism, routing: str) -> tuple[dict, Counter[str]]:
        """Returns the row of one routing, and the microseconds of a step's kernels if they are wanted."""
        if self.frozen_form == "whole":
            model = random_model(
                config,
                jnp.bfloat16,
                param_dtype=jnp.dtype(self.param_dtype),
                mesh=parallelism.mesh,
                pipe_chunks=parallelism.pipe_chunks,
            )
        else:
            model = random_model_in_form(config, self.frozen_form)
        model.set_precision(self.precision)
        if self.lora_rank is not None:
            ranks = {} if self.lora_expert_rank is None else {"experts": self.lora_expert_rank}
            print(add_lora(model, LoraSettings(rank=self.lora_rank, ranks=ranks), rngs=nnx.Rngs(0)))
        optimizer = make_optimizer(1e-5, moment_dtype=jnp.dtype(self.moment_dtype))
        graph, state = nnx.graphdef(model), init_state(model, optimizer, parallelism)
        del model
        state_bytes = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
        step = make_train_step(
            graph,
            optimizer,
            NextToken(LossWeights(aux_loss_coef=1e-3)),
            gradient_accumulation=self.gradient_accumulation,
            remat=self.kept,
            force_balanced_routing=routing == "balanced",
            parallelism=parallelism,
        )
        arrays = random_rows(self.rows, self.seq, config.vocab_size, packed=self.packed)
        flops_per_token = training_flops_per_token(config, 1 + 2 * float(arrays["positions"].mean()))
        batch = put_batch(arrays, state.params, parallelism)
        expert_devices = parallelism.mesh.shape["expert"]
        seconds, losses, of_rebalance = [], [], {}
        if routing == "rebalanced":
            # The first call compiles.
            for _ in range(2):
                state, metrics = step(state, batch)
                began = time.perf_counter()
                load = np.asarray(metrics["expert_load"])
                state, _ = jax.block_until_ready(rebalance(state, config, load, expert_devices))
                of_rebalance = {"rebalance_seconds": time.perf_counter() - began}
        for _ in range(self.steps + 1):
            began = time.perf_counter()
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
            jax.block_until_ready(state)
            seconds.append(time.perf_counter() - began)

        def launch() -> None:
            nonlocal state
            state, _ = step(state, batch)

        kernels = microseconds_of_kernels(launch, lambda: state) if self.kernels else Counter()
        devices = parallelism.mesh.size
        median = statistics.median(seconds[1:])
        tokens = self.rows * self.seq
        load = np.asarray(metrics["expert_load"])
        loads = {"load": busiest(load), "device_load": busiest(device_load(load, expert_devices))} if len(load) else {}
        row = {
            "seconds": median,
            "compile_seconds": seconds[0],
            "tokens_per_second_per_gpu": tokens / median / devices,
            "tflops_per_gpu": tokens * flops_per_token / median / devices / 1e12,
            "peak_gib": peak_gib(),
            "state_gib": state_bytes / GIB,
            "losses": [losses[0], losses[-1]],
            **loads,
            **of_rebalance,
        }
        return row, kernels


def busiest(load: np.ndarray) -> float:
    """Returns the largest load over the mean, averaged over layers."""
    return float((load.max(axis=1) / load.mean(axis=1)).mean())


def measure_ceiling(size: int) -> float:
    """Returns the TFLOP/s of one GPU's dense bf16 matmul."""
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
    f = jax.jit(jnp.matmul)
    jax.block_until_ready(f(a, b))
    began = time.perf_counter()
    for _ in range(50):
        c = f(a, b)
    jax.block_until_ready(c)
    return 2 * size**3 * 50 / (time.perf_counter() - began) / 1e12


@dataclass(kw_only=True)
class Dpo(Case):
    """A row for each number of layers, and the prediction for all layers."""

    config: one_of(NAMED_CONFIGS) = "qwen3-30b-a3b"
    layers: tuple[int, ...] = (4, 8)
    rows: int = 8
    seq: int = 4096
    rank: int = 32
    remat: bool = True
    own_routing: bool = False  # the router's choice; default: every expert has equal load
    steps: int = 5

    SMALL = dict(layers=(1, 2), rows=2, seq=64, steps=1)

    def results(self):
        """Yields the milliseconds of the steps, and their ratios."""
        found = {}
        for layers in self.layers:
            found[layers] = self.measure(config_of(self.config, small=self.small, layers=layers))
            yield {"layers": f"{layers}"} | ratios(found[layers])
            gc.collect()
        if len(self.layers) > 1:
            first, *_, last = self.layers
            of_layer = {name: (found[last][name] - found[first][name]) / (last - first) for name in found[last]}
            total = NAMED_CONFIGS[self.config].num_hidden_layers
            predicted = {name: found[first][name] + (total - first) * seconds for name, seconds in of_layer.items()}
            yield {"layers": f"{total}"} | ratios(predicted) | {"note": "predicted"}

    def measure(self, config: ModelConfig) -> dict[str, float]:
        """Returns the median seconds of the steps: dpo, stored, sft (of all rows), half (sft of half the rows)."""
        batch = pairs(self.rows, self.seq, config.vocab_size)
        stored = batch | {"reference_log_probs": np.full((self.rows, 1, 2), -100, np.float32)}
        half = {name: array[: self.rows // 2] for name, array in batch.items()}
        dpo = Preference(PreferenceSettings("dpo"))
        steps = {"dpo": (dpo, batch), "stored": (dpo, stored), "sft": (NextToken(), batch), "half": (NextToken(), half)}
        model = random_model(config, jnp.bfloat16, param_dtype=jnp.bfloat16)
        add_lora(model, LoraSettings(rank=self.rank), rngs=nnx.Rngs(0))
        optimizer = make_optimizer(1e-5)
        graph, state = nnx.graphdef(model), init_state(model, optimizer)
        del model
        options = dict(remat=self.remat, force_balanced_routing=not self.own_routing)
        found = {}
        for name, (objective, rows) in steps.items():
            step, placed, seconds = make_train_step(graph, optimizer, objective, **options), put_batch(rows, state.params), []
            for _ in range(self.steps + 2):
                began = time.perf_counter()
                state, metrics = step(state, placed)
                jax.block_until_ready((state, metrics))
                seconds.append(time.perf_counter() - began)
            found[name] = statistics.median(seconds[2:])
            print(f"  {name}: loss {float(metrics['loss']):.4f}, peak so far {peak_gib():.1f} GiB", flush=True)
        return found


def ratios(seconds: dict[str, float]) -> dict[str, float]:
    """Returns the times in ms, and the ratios."""
    two = 2 * seconds["half"]
    of_two = {f"{name}_of_two_halves": seconds[name] / two for name in ("dpo", "stored")}
    return (
        {f"{name}_ms": 1e3 * value for name, value in seconds.items()}
        | of_two
        | {"dpo_of_sft": seconds["dpo"] / seconds["sft"]}
    )


def pairs(rows: int, seq: int, vocab_size: int) -> dict[str, np.ndarray]:
    """Returns rows of two texts of random tokens each; the second half of each text is learned."""
    half, index = seq // 2, np.broadcast_to(np.arange(seq), (rows, seq))
    positions = index % half
    return random_rows(rows, seq, vocab_size) | {
        "loss_mask": ((positions >= half // 2) & (positions < half - 1)).astype(np.int32),
        "positions": positions.astype(np.int32),
        "segment_ids": (1 + index // half).astype(np.int32),
        "example": np.arange(rows, dtype=np.int32)[:, None],
    }


CASES = {"step": Step, "dpo": Dpo}

if __name__ == "__main__":
    main(__doc__, CASES)
