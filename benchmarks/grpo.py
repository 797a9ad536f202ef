"""Times whole steps of reinforcement learning, phase by phase, on one device or a mesh, with a model of random weights.

    python benchmarks/grpo.py                                           # 2 layers of Qwen3-30B-A3B, all parameters
    python benchmarks/grpo.py --layers 4 --prompts 32 --new 1848        # 256 answers of 1,848 tokens to prompts of 200
    python benchmarks/grpo.py --layers 48 --lora-rank 32                # adapters on frozen weights, without exact mode
    python benchmarks/grpo.py --layers 12 --mesh fsdp=4                 # draws and learns on four devices
    python benchmarks/grpo.py --replicas 4                              # draws on four devices, and learns on one
    JAX_PLATFORMS=cpu python benchmarks/grpo.py --small
    JAX_PLATFORMS=cpu python benchmarks/grpo.py curve                   # rewards of a tiny model, here and by TRL

`step`: a row is a step of `reinforcement.Policy`. Every answer has `--new` tokens, because nothing ends it; or `--mean` on
average, at most `--new`. The first two steps may compile. A later step that compiles is a failure, and so is a token whose bits
differ in exact mode. The audit computes a few rows, and all rows in the first and in the last step. Seconds of the phases:

    sample   draw all answers; `tokens_per_s` counts their tokens, `engine_steps` the steps of all devices
    reward   call the reward function
    sleep    free the engine's pages and its copies of weights
    again    compute the log-probabilities of all answers again, as trainers do whose sampler has other bits (without exact)
    audit    compare rows with the strict pass (exact alone)
    pack     advantages and packed rows
    update   the training step
    wake     gather the new weights, and give them and pages to the engine, until the devices are idle

`tokens_per_s_gpu` counts the answers' tokens of a whole step, for each device that draws. `allocated` is the memory in use on
the first device after `sample`, and after `sleep`. The peak is that of the process until then. A row without a
step has the medians of the steps that compile nothing and audit a few rows. The last row compares the medians: "exact over
recomputed" is the price of exact mode. Without `--mean`, answers have equal lengths in both modes, and so equal rows.
"""

import gc
import json
import logging
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
import transformers
from flax import nnx
from harness import GIB, Case, main, one_of, peak_gib, timed
from inputs import config_of

from moe_jax.adapters import LoraSettings, add_lora
from moe_jax.checkpoint.hf_save import save_pretrained
from moe_jax.config import NAMED_CONFIGS, ModelConfig
from moe_jax.cost.flops import num_parameters
from moe_jax.kernels import backends
from moe_jax.models.decoder import Decoder
from moe_jax.models.random_weights import random_model
from moe_jax.parallel import make_mesh
from moe_jax.recipes import GrpoSettings, grpo
from moe_jax.reinforcement.advantages import advantages, token_weights, total_rewards
from moe_jax.reinforcement.policy import Policy
from moe_jax.reinforcement.rewards import score
from moe_jax.reinforcement.rows import policy_rows
from moe_jax.reinforcement.samples import Group
from moe_jax.reinforcement.settings import LossSettings, PolicySettings
from moe_jax.serving.pages import pages_of
from moe_jax.serving.request import EngineLimits
from moe_jax.serving.weights import unfused_reason
from moe_jax.train import make_optimizer

COMPILING_STEPS = 2
"""Number of steps that may compile."""
PHASES = ("sample", "reward", "sleep", "again", "audit", "pack", "update", "wake")


@dataclass(kw_only=True)
class Step(Case):
    """A row for each step, for the medians of each mode, and for the price of exact mode."""

    config: one_of(NAMED_CONFIGS) = "qwen3-30b-a3b"
    layers: int = 2
    modes: tuple[Literal["exact", "inexact"], ...] = ("exact", "inexact")
    prompts: int = 8
    samples: int = 8  # answers to a prompt
    prompt: int = 200  # tokens of a prompt
    new: int = 312  # tokens of an answer
    mean: int | None = None  # answers end at random, after this number of tokens on average; default: all have --new
    rows: int = 4  # packed rows of a micro-batch on each device
    mesh: tuple[str, ...] = ("fsdp=1",)  # AXIS=N: axes data, fsdp
    replicas: int | None = None  # devices that draw; default: all devices of the mesh
    pages: int | None = None  # pages of keys and values on each device; default: enough for its answers at once
    sequences: int | None = None  # answers that each device draws at once; default: its share of all
    steps: int = 6
    lora_rank: int | None = None  # train adapters of this rank; without exact mode
    moment_dtype: Literal["float32", "bfloat16"] = "float32"

    SMALL = dict(layers=1, modes=("inexact",), prompts=2, samples=2, prompt=5, new=3, rows=1, steps=4)

    def start(self) -> None:
        """Refuses options that do not fit."""
        if self.steps < COMPILING_STEPS + 2:
            raise SystemExit(f"--steps must be at least {COMPILING_STEPS + 2}; got {self.steps}")

    @property
    def drawing(self) -> int:
        """The number of devices that draw."""
        return self.replicas or self.learning

    @property
    def learning(self) -> int:
        """The number of devices that learn."""
        return math.prod(int(axis.split("=")[1]) for axis in self.mesh)

    def results(self) -> Iterator[dict[str, Any]]:
        """Yields the rows."""
        logging.basicConfig(format="%(name)s: %(message)s")
        logging.getLogger("moe_jax").setLevel(logging.INFO)
        config, compiled = self.sizes(), list[tuple[str, float]]()

        def listen(event: str, seconds: float, fun_name: str = "?", **_: Any) -> None:
            if "backend_compile" in event:
                compiled.append((fun_name, seconds))

        jax.monitoring.register_event_duration_secs_listener(listen)
        dtype = jnp.float32 if self.small and "exact" not in self.modes else jnp.bfloat16
        sizes = {name: int(size) for name, size in (axis.split("=") for axis in self.mesh)}
        mesh = make_mesh(**sizes, devices=jax.devices()[: self.learning]) if self.learning > 1 else None
        model = random_model(config, dtype, mesh=mesh)
        if self.lora_rank is not None:
            print(add_lora(model, LoraSettings(rank=self.lora_rank), rngs=nnx.Rngs(0)))
        modes = [mode for mode in self.modes if mode != "exact" or self.lora_rank is None]
        print(
            f"{config.num_hidden_layers} layers, {num_parameters(config) / 1e9:.2f} B parameters in {jnp.dtype(dtype).name}, "
            f"{self.prompts} x {self.samples} answers of {self.new} tokens to prompts of {self.prompt}, modes {modes}, "
            f"{self.drawing} devices draw and {self.learning} learn\n"
            f"compute capability {backends.compute_capability()}; fused layers refused: {unfused_reason(model)}",
            flush=True,
        )
        found = {}
        for mode in modes:
            rows = []
            for row in self.steps_of(model, mode, compiled):
                rows.append(row)
                yield row
            steady = [row for row in rows[COMPILING_STEPS:-1] if not row["compiled"]] or rows[-1:]
            timings = [name for name, value in rows[-1].items() if isinstance(value, float) and name.endswith("_s")]
            found[mode] = {name: statistics.median(row[name] for row in steady) for name in timings}
            yield {"mode": mode, "steady_steps": len(steady)} | found[mode]
        if len(found) == 2:
            exact, inexact = found["exact"]["total_s"], found["inexact"]["total_s"]
            without = inexact - found["inexact"]["again_s"]
            yield dict(exact_s=exact, recomputed_s=inexact, neither_s=without) | {
                "exact over recomputed": exact / inexact, "exact over neither": exact / without,
            }  # fmt: skip

    def sizes(self) -> ModelConfig:
        """Returns the config. In exact mode a small one has the smallest sizes of the strict kernels."""
        config = config_of(self.config, small=self.small, layers=self.layers).without_mtp()
        if self.small and "exact" in self.modes:
            sizes = dict(vocab_size=128, hidden_size=128, head_dim=128, num_attention_heads=2, num_key_value_heads=1)
            config = replace(config, num_experts=128, moe_intermediate_size=128, **sizes)
        return config

    def steps_of(self, model: Decoder, mode: str, compiled: list[tuple[str, float]]) -> Iterator[dict[str, Any]]:
        """Yields the row of each step. The model has the last weights then."""
        length, answers = self.prompt + self.new, self.prompts * self.samples
        sequences = self.sequences or -(-answers // self.drawing)
        limits = EngineLimits(
            max_sequences=sequences,
            max_length=length,
            max_tokens_per_step=max(sequences, 8 if self.small else 8192),
            num_pages=self.pages or 1 + sequences * pages_of(length),
            max_waiting=answers,
            replicas=self.drawing,
        )
        print(f"{mode}: {limits}", flush=True)
        settings = PolicySettings(samples=self.samples, max_new_tokens=self.new, exact=mode == "exact")
        optimizer = make_optimizer(1e-6, moment_dtype=jnp.dtype(self.moment_dtype))
        tokenizer = tokenizer_of_numbers(model.config.vocab_size)
        options = dict(tokenizer=tokenizer, limits=limits, seq_len=length, rows=self.rows, on_mismatch="warn")
        with closing(Policy(model, optimizer, settings, **options)) as policy:
            for number in range(self.steps):
                if number == self.steps - 1:
                    policy.restore(policy.state)  # The next audit is of all rows.
                before = len(compiled)
                row = self.step(policy, number)
                names, seconds = zip(*compiled[before:], strict=True) if compiled[before:] else ((), ())
                row |= dict(compiled=len(names), compile_seconds=sum(seconds))
                failures = []
                if number >= COMPILING_STEPS and names:
                    failures.append(f"compiled after step {COMPILING_STEPS}: {' '.join(names)}")
                if row["mismatch_tokens"]:
                    failures.append(f"{row['mismatch_tokens']:.0f} tokens differ")
                yield {"mode": mode, "step": number + 1} | row | ({"failure": "; ".join(failures)} if failures else {})
        del policy
        gc.collect()

    def step(self, policy: Policy, number: int) -> dict[str, Any]:
        """Returns the row of a step."""
        rng, vocab_size = np.random.default_rng(number), policy.model.config.vocab_size
        rows = [(key, {"prompt": " ".join(map(str, rng.integers(2, vocab_size, self.prompt)))}) for key in range(self.prompts)]
        before = policy.engine.stats().num_steps
        # Random weights draw all tokens about equally often.
        ends = range(0 if self.mean is None else vocab_size // self.mean)
        forced = dict(ignore_eos=True, stop_token_ids=tuple(ends))
        seconds, groups = {}, []
        seconds["sample"], groups = timed(lambda: list(policy.sample(rows, step=number, seed=0, **forced)))
        engine_steps, memory = policy.engine.stats().num_steps - before, [allocated_gib()]
        seconds["reward"], groups = timed(lambda: score(groups, [share_of_odd_tokens]))
        seconds["sleep"], _ = timed(policy.engine.sleep)
        memory.append(allocated_gib())
        seconds["again"] = 0.0 if policy.settings.exact else self.compute_again(policy, groups)
        whole, metrics = timed(lambda: policy.update(groups))
        idle, _ = timed(jax.live_arrays)
        seconds |= {"audit": metrics.get("time/audit", 0.0), "update": metrics["time/update"]}
        seconds["pack"] = whole - seconds["audit"] - seconds["update"] - metrics["time/sync"]
        seconds["wake"] = metrics["time/sync"] + idle
        tokens = sum(len(sample.tokens) for group in groups for sample in group.samples)
        trained = sum(len(group.prompt_tokens) * self.samples for group in groups) + tokens
        return {f"{name}_s": seconds[name] for name in PHASES} | {
            "total_s": sum(seconds.values()),
            "tokens": tokens,
            "tokens_per_s": tokens / seconds["sample"],
            "tokens_per_s_gpu": tokens / sum(seconds.values()) / max(self.drawing, self.learning),
            "trained_per_s": trained / seconds["update"],
            "engine_steps": engine_steps,
            "audited_tokens": metrics.get("audited_tokens"),
            "mismatch_tokens": metrics.get("mismatch_tokens"),
            "logp_difference": metrics["sampling/sampling_logp_difference/max"],
            "grad_norm": metrics["grad_norm"],
            "allocated_gib": memory,
            "peak_gib": peak_gib(),
        }

    def compute_again(self, policy: Policy, groups: list[Group]) -> float:
        """Returns the seconds of the log-probabilities of all answers by the model that is trained."""
        rewards = [total_rewards(group, policy.settings) for group in groups]
        values = advantages(rewards, policy.settings), token_weights(groups, policy.settings)
        batch = policy_rows(groups, *values, seq_len=self.prompt + self.new)
        return timed(lambda: policy.log_probs(policy.drawing_model(), batch))[0]


def share_of_odd_tokens(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Returns the reward of each answer, which has some spread."""
    return [float(np.mean(np.asarray(tokens) % 2)) for tokens in completion_ids]


def tokenizer_of_numbers(vocab_size: int) -> transformers.PreTrainedTokenizerFast:
    """Returns a tokenizer whose texts are the tokens' numbers, separated by spaces. Tokens 0 and 1 are special."""
    words = ["<end>", "<pad>", *map(str, range(2, vocab_size))]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")


def allocated_gib() -> float:
    """Returns the memory in use on the first device of this process; 0 on a CPU."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_in_use", 0) / GIB


@dataclass(kw_only=True)
class Curve(Case):
    """A row for each block of steps."""

    config: one_of(NAMED_CONFIGS) = "qwen3-30b-a3b"
    prompts: int = 8
    samples: int = 8
    new: int = 16
    steps: int = 60
    block: int = 10
    seeds: tuple[int, ...] = (0, 1, 2)
    learning_rate: float = 3e-3
    loss: Literal["dapo", "grpo", "dr_grpo"] = "dapo"

    SMALL = dict(prompts=2, samples=2, new=3, steps=2, block=1, seeds=(0,))

    def results(self) -> Iterator[dict[str, Any]]:
        """Yields the rows; the first ones have each curve."""
        config, curves = replace(config_of(self.config, small=True), eos_token_id=0), {}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            save_pretrained(random_model(config, jnp.float32), folder / "model", progress=False)
            tokenizer_of_numbers(config.vocab_size).save_pretrained(folder / "model")
            rng = np.random.default_rng(0)
            prompts = [" ".join(map(str, rng.integers(2, config.vocab_size, 8))) for _ in range(4 * self.prompts)]

            def small_numbers(completions: list[str], **columns: Any) -> list[float]:
                texts = [[int(word) for word in text.split()] for text in completions]
                return [sum(number < config.vocab_size // 4 for number in text) / self.new for text in texts]

            for system, train in (("moe_jax", self.by_moe_jax), ("trl", self.by_trl)):
                curves[system] = []
                for seed in self.seeds:
                    seconds, rewards = timed(partial(train, folder, prompts, small_numbers, seed))
                    curves[system].append(rewards)
                    yield dict(system=system, seed=seed, seconds=seconds, rewards=[round(reward, 4) for reward in rewards])
        blocks = {system: np.asarray(each).reshape(len(self.seeds), -1, self.block).mean(2) for system, each in curves.items()}
        overlaps = []
        for number in range(self.steps // self.block):
            row = {"steps": f"{1 + number * self.block}-{(number + 1) * self.block}"}
            for system, each in blocks.items():
                of_block = each[:, number]
                row |= {system: float(of_block.mean()), f"{system}_band": [float(of_block.min()), float(of_block.max())]}
            (low, high), (trl_low, trl_high) = row["moe_jax_band"], row["trl_band"]
            overlaps.append(low <= trl_high and trl_low <= high)
            yield row | {"overlap": overlaps[-1]}
        yield dict(blocks=len(overlaps), overlapping=sum(overlaps))

    def by_moe_jax(self, folder: Path, prompts: list[str], reward: Callable, seed: int) -> list[float]:
        """Returns the mean reward of each step of the recipe."""
        data = folder / "prompts.jsonl"
        data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        settings = GrpoSettings(
            model=str(folder / "model"),
            data=str(data),
            output=str(folder / f"run{seed}"),
            prompts=self.prompts,
            samples=self.samples,
            max_new_tokens=self.new,
            seq_len=64,
            steps=self.steps,
            batch_size=8,
            learning_rate=self.learning_rate,
            warmup_steps=0,
            dtype="float32",
            checkpoint_every=self.steps,
            grpo=LossSettings(loss=self.loss),
            seed=seed,
        )
        return [record["reward"] for record in grpo(settings, rewards=[reward]).metrics]

    def by_trl(self, folder: Path, prompts: list[str], reward: Callable, seed: int) -> list[float]:
        """Returns the same of TRL's trainer."""
        import datasets
        import trl

        settings = trl.GRPOConfig(
            output_dir=str(folder / f"trl{seed}"),
            per_device_train_batch_size=self.prompts * self.samples,
            num_generations=self.samples,
            max_completion_length=self.new,
            max_steps=self.steps,
            learning_rate=self.learning_rate,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            weight_decay=0.0,
            max_grad_norm=1.0,
            loss_type=self.loss,
            scale_rewards="none" if self.loss == "dr_grpo" else "group",
            epsilon=0.2,
            epsilon_high=0.28,
            beta=0.0,
            router_aux_loss_coef=0.0,
            temperature=1.0,
            seed=seed,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            model_init_kwargs={"dtype": "float32"},
        )
        trainer = trl.GRPOTrainer(
            model=str(folder / "model"),
            reward_funcs=[reward],
            args=settings,
            train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
            processing_class=transformers.AutoTokenizer.from_pretrained(folder / "model", padding_side="left"),
        )
        trainer.train()
        return [record["reward"] for record in trainer.state.log_history if "reward" in record]


CASES = {"step": Step, "curve": Curve}

if __name__ == "__main__":
    main(__doc__, CASES)
