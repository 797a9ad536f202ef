"""Trains small models and draws their curves: FP8 and bf16, adapters and all parameters, expert biases and none.

    python benchmarks/quality.py --plot fp8_loss.png                  # one GPU: bf16 and FP8, two seeds each, 2000 steps
    python benchmarks/quality.py lora --plot docs/lora_loss.png       # ten minutes on a CPU
    python benchmarks/quality.py balance --plot docs/balance.png      # 15 minutes on 2 CPU cores

`fp8`: the text is the source code of the installed Python packages, as bytes; every 50th file is held out. A seed decides the
random weights and the order of the text, and both precisions have both. The learning rate decays to zero. The gap is that of
the means over seeds, relative; it is compared with the spread of the seeds themselves.

`lora`: the base is the demo's small Qwen3-MoE, trained on functions of Python's standard library. Fine-tuning asks for other
functions by their names. Held-out chats measure both runs. Runs that `--folder` holds are not repeated.

`balance`: the question is if DeepSeek-V3's expert biases alone balance experts that start unbalanced. Model and text are the
demo's. The router's rows are scaled by 1 to 3, so that the experts with the longest rows start in the top k of most tokens. No
loss balances them. Curves are loads of the busiest expert over the mean, in each layer over `--window` steps.
"""

import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from harness import Case, main
from matplotlib.figure import Figure

import moe_jax
from moe_jax import from_config
from moe_jax.adapters import LoraSettings
from moe_jax.checkpoint.hf_save import save_pretrained
from moe_jax.demo.run import small_config, write_json_lines
from moe_jax.demo.text import as_chat, library_functions, train_tokenizer
from moe_jax.recipes import FinetuneSettings, finetune
from moe_jax.recipes.run.folder import export
from moe_jax.runtime.files import save_png
from moe_jax.train import (
    LossWeights,
    NextToken,
    init_state,
    make_evaluation,
    make_optimizer,
    make_train_step,
    put_batch,
    warmup_cosine,
)
from moe_jax.train.metrics import read_records
from moe_jax.train.plots import SMOOTHING_STEPS, moving_average

BYTES, HELD_OUT_EVERY, HELD_OUT_BATCHES = 256, 50, 32
STEPS_OF_A_POINT = 20
"""Steps whose mean loss is one point of a curve."""
CHATS, HELD_OUT = 2000, 200
"""The numbers of functions for fine-tuning and for its held-out loss; the base learns all others."""


@dataclass(kw_only=True)
class Fp8(Case):
    """A row for each run, and one for each gap."""

    precisions: tuple[Literal["bf16", "fp8", "fp8_kept"], ...] = ("bf16", "fp8")
    seeds: tuple[int, ...] = (0, 1)
    steps: int = 2000
    rows: int = 32
    seq: int = 256
    layers: int = 4
    hidden: int = 512
    intermediate: int = 256
    experts: int = 16
    top_k: int = 4
    learning_rate: float = 1e-3
    megabytes: float = 40  # of text at most
    plot: Path | None = None  # a PNG file

    SMALL = dict(seeds=(0,), steps=2, rows=4, seq=64, layers=1, hidden=128, intermediate=128, experts=4, top_k=2, megabytes=0.2)

    def results(self):
        """Yields the rows, then draws the curves."""
        learned, held_out = python_sources(int(self.megabytes * 1e6))
        print(f"{len(learned) / 1e6:.1f} MB of text, {len(held_out) / 1e6:.1f} MB held out", flush=True)
        runs, shown = [], ("precision", "seed", "last_loss", "held_out", "seconds")
        for seed in self.seeds:
            for precision in self.precisions:
                runs.append(self.train(precision, seed, learned, held_out))
                yield {name: runs[-1][name] for name in shown}
        yield from self.gaps(runs)
        if self.plot is not None:
            self.draw(runs)

    def train(self, precision: str, seed: int, learned: np.ndarray, held_out: np.ndarray) -> dict:
        """Returns the mean losses of each `STEPS_OF_A_POINT` steps, and the loss on text held out."""
        config = moe_jax.Qwen3MoeConfig(
            vocab_size=BYTES,
            hidden_size=self.hidden,
            intermediate_size=2 * self.hidden,
            moe_intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // 64,
            num_key_value_heads=self.hidden // 64,
            head_dim=64,
            num_experts=self.experts,
            num_experts_per_tok=self.top_k,
            norm_topk_prob=True,
            max_position_embeddings=self.seq,
        )
        model = from_config(config, dtype=jnp.bfloat16, param_dtype=jnp.float32, rngs=nnx.Rngs(seed))
        model.set_precision(precision)
        optimizer = make_optimizer(warmup_cosine(self.learning_rate, steps=self.steps, warmup_steps=None, min_ratio=0.0))
        graph, state = nnx.graphdef(model), init_state(model, optimizer)
        step = make_train_step(graph, optimizer, NextToken(LossWeights(aux_loss_coef=1e-2)), remat=False)
        rng = np.random.default_rng(seed)
        began, losses = time.perf_counter(), []
        for _ in range(self.steps):
            state, metrics = step(state, put_batch(self.batch(rng, learned), state.params))
            losses.append(metrics["loss"])
        losses = np.asarray(jax.device_get(losses), np.float64)
        seconds = time.perf_counter() - began
        rng = np.random.default_rng(0)
        batches = [put_batch(self.batch(rng, held_out), state.params) for _ in range(HELD_OUT_BATCHES)]
        points = [float(part.mean()) for part in np.array_split(losses, max(1, self.steps // STEPS_OF_A_POINT))]
        found = dict(precision=precision, seed=seed, losses=points, last_loss=points[-1], seconds=seconds)
        return found | dict(held_out=float(make_evaluation(graph)(state, batches)))

    def batch(self, rng: np.random.Generator, text: np.ndarray) -> dict[str, np.ndarray]:
        """Returns random windows of the text."""
        starts = rng.integers(0, len(text) - self.seq, self.rows)
        windows = text[starts[:, None] + np.arange(self.seq + 1)].astype(np.int32)
        ones = np.ones((self.rows, self.seq), np.int32)
        positions = np.broadcast_to(np.arange(self.seq, dtype=np.int32), ones.shape)
        arrays = dict(tokens=windows[:, :-1], labels=windows[:, 1:], loss_mask=ones, segment_ids=ones)
        return arrays | {"positions": positions}

    def gaps(self, runs: list[dict]):
        """Yields for each precision after the first its relative gap to the first, and the relative spread of the seeds."""
        base, *others = self.precisions
        values = {
            "last tenth": lambda run: float(np.mean(run["losses"][-max(1, len(run["losses"]) // 10) :])),
            "held out": lambda run: run["held_out"],
        }
        for name, value in values.items():
            of = {each: np.array([value(run) for run in runs if run["precision"] == each]) for each in self.precisions}
            spread = float(np.ptp(of[base]) / of[base].mean())
            for other in others:
                gap = float(of[other].mean() / of[base].mean() - 1)
                yield dict(losses=f"{other} from {base}, {name}", gap=gap, spread_of_seeds=spread)

    def draw(self, runs: list[dict]) -> None:
        """Draws the losses, and below the difference of each run from the first precision's run of the same seed."""
        figure = Figure(figsize=(7, 6), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        base = {run["seed"]: run for run in runs if run["precision"] == self.precisions[0]}
        for run in runs:
            steps = STEPS_OF_A_POINT * (1 + np.arange(len(run["losses"])))
            label = f"{run['precision']}, seed {run['seed']}"
            upper.plot(steps, run["losses"], label=label, linewidth=1)
            if run is not base[run["seed"]]:
                lower.plot(steps, 100 * (np.array(run["losses"]) / base[run["seed"]]["losses"] - 1), label=label, linewidth=1)
        upper.set(ylabel="cross-entropy a byte", yscale="log")
        lower.set(xlabel="step", ylabel=f"% from {self.precisions[0]}")
        lower.axhline(0, color="black", linewidth=0.5)
        finish(figure, self.plot)


def python_sources(limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bytes of Python files, shuffled: those to learn, at most `limit`, and those held out."""
    folders = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    files = sorted({path for folder in folders for path in folder.rglob("*.py")})
    np.random.default_rng(0).shuffle(files)
    texts: list[bytes] = []
    size = 0
    for path in files:
        if size >= limit:
            break
        texts.append(path.read_bytes())
        size += len(texts[-1])
    learned = b"".join(text for i, text in enumerate(texts) if i % HELD_OUT_EVERY)
    return np.frombuffer(learned, np.uint8), np.frombuffer(b"".join(texts[::HELD_OUT_EVERY]), np.uint8)


@dataclass(kw_only=True)
class Lora(Case):
    """A row for each run: its last held-out loss."""

    folder: Path = Path("runs/lora_beside_full")
    plot: Path = Path("lora_loss.png")  # a PNG file
    base_steps: int = 300
    steps: int = 150
    batch_size: int = 8
    rank: int = 16
    rate: float = 1e-3  # of all parameters
    lora_rate: float = 1e-2
    eval_every: int = 20

    SMALL = dict(base_steps=1, steps=1, batch_size=1, eval_every=1)

    def results(self):
        """Trains the base and both runs, as far as the folder does not hold them, and draws the picture."""
        self.folder.mkdir(parents=True, exist_ok=True)
        base = self.trained_base()
        runs = {
            "all parameters": dict(learning_rate=self.rate),
            f"adapters of rank {self.rank}": dict(learning_rate=self.lora_rate, lora=LoraSettings(rank=self.rank)),
        }
        figure = Figure(figsize=(6.4, 3.6), dpi=80, layout="constrained")
        axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per token)")
        for (name, changes), color in zip(runs.items(), ("tab:blue", "tab:orange"), strict=True):
            settings = self.settings(name.split()[0], str(base), "chats", self.steps, **changes)
            finetune(settings)
            records = read_records(Path(settings.output) / "metrics.jsonl")
            smooth = moving_average([record["loss"] for record in records], SMOOTHING_STEPS)
            axes.plot([record["step"] for record in records], smooth, color=color, label=name)
            measured = {record["step"]: record["eval_loss"] for record in records if "eval_loss" in record}
            axes.plot(list(measured), list(measured.values()), "o", color=color, markersize=4)
            yield dict(run=name, steps=records[-1]["step"], held_out_loss=list(measured.values())[-1])
        finish(figure, self.plot)

    def trained_base(self) -> Path:
        """Writes the data, and trains the base on those functions that no chat asks for; returns its folder."""
        functions = library_functions()
        of_chats, of_base = functions[: CHATS + HELD_OUT], functions[CHATS + HELD_OUT :]
        held_out = of_chats[CHATS : CHATS + 4] if self.small else of_chats[CHATS:]
        write_json_lines(self.folder / "text.jsonl", [{"text": text} for text in of_base])
        write_json_lines(self.folder / "chats.jsonl", [as_chat(text) for text in of_chats[:CHATS]])
        write_json_lines(self.folder / "held_out.jsonl", [as_chat(text) for text in held_out])
        settings = self.settings("base", str(self.folder / "initial"), "text", self.base_steps, learning_rate=5e-3)
        if not (folder := Path(settings.output) / "model").is_dir():
            tokenizer = train_tokenizer(functions, 1024)
            tokenizer.save_pretrained(self.folder / "tokenizer")
            model = from_config(small_config("qwen3_moe", len(tokenizer), 0), rngs=nnx.Rngs(0))
            save_pretrained(model, self.folder / "initial", tokenizer_from=self.folder / "tokenizer", progress=False)
            export(finetune(settings).model, settings)
        return folder

    def settings(self, name: str, model: str, data: str, steps: int, **changes) -> FinetuneSettings:
        """Returns a run's settings; only runs on chats measure a held-out loss."""
        held_out = {"eval_data": str(self.folder / "held_out.jsonl"), "eval_every": self.eval_every} if data == "chats" else {}
        return FinetuneSettings(
            model=model, data=str(self.folder / f"{data}.jsonl"), output=str(self.folder / name), seq_len=128,
            batch_size=self.batch_size, steps=steps, sequence_loss_coef=0.03, checkpoint_every=steps, dtype="float32",
            remat=False, **held_out, **changes,
        )  # fmt: skip


@dataclass(kw_only=True)
class Balance(Case):
    """A row for each rate: the load of the busiest expert of the worst layer, in the first and in the last window."""

    folder: Path = Path("runs/balance")
    plot: Path = Path("balance.png")  # a PNG file
    rates: tuple[float, ...] = (0.0, 0.005)  # changes of a bias in one step
    steps: int = 500
    batch_size: int = 32
    window: int = 25  # number of steps whose loads are summed

    SMALL = dict(rates=(0.005,), steps=2, batch_size=1, window=1)

    def results(self):
        """Trains with each rate, and draws the curves."""
        self.folder.mkdir(parents=True, exist_ok=True)
        texts = library_functions()
        write_json_lines(self.folder / "text.jsonl", [{"text": text} for text in texts])
        tokenizer = train_tokenizer(texts, 1024)
        figure = Figure(figsize=(7, 3.5), layout="constrained")
        axes = figure.add_subplot(xlabel="step", ylabel="busiest expert / mean", title="Load of the experts of each layer")
        for rate, color in zip(self.rates, ("tab:gray", "tab:blue", "tab:green", "tab:orange"), strict=False):
            run = self.folder / f"rate-{rate}"
            finetune(self.settings(run, rate), model=skewed_model(tokenizer), tokenizer=tokenizer)
            loads = np.array([record["expert_load"] for record in read_records(run / "expert_load.jsonl")])
            whole = len(loads) // self.window * self.window
            sums = loads[:whole].reshape(-1, self.window, *loads.shape[1:]).sum(axis=1)
            curve = sums.max(axis=-1) / sums.mean(axis=-1)
            name = f"rate {rate}" if rate else "no biases"
            for layer, values in enumerate(curve.T):
                steps = self.window * np.arange(1, len(values) + 1)
                axes.plot(steps, values, color=color, linewidth=1.2, label=name if layer == 0 else None)
            yield dict(run=name, first=float(curve[0].max()), last=float(curve[-1].max()), curve=curve.tolist())
        axes.axhline(1.1, color="tab:red", linestyle=":", linewidth=1)
        finish(figure, self.plot)

    COLUMNS = ("run", "first", "last")

    def settings(self, run: Path, rate: float) -> FinetuneSettings:
        """Returns the demo's settings, with biases as the only balancing."""
        return FinetuneSettings(
            model="none", data=str(self.folder / "text.jsonl"), data_format="text", output=str(run), seq_len=128,
            batch_size=self.batch_size, steps=self.steps, learning_rate=3e-3, warmup_steps=self.steps // 10,
            checkpoint_every=self.steps, dtype="float32", remat=False, aux_loss_coef=0.0, sequence_loss_coef=0.0,
            expert_bias_update_rate=rate,
        )  # fmt: skip


def skewed_model(tokenizer):
    """Returns the demo's DeepSeek-V3 with a router that prefers experts with higher numbers."""
    model = from_config(small_config("deepseek_v3", len(tokenizer), tokenizer.eos_token_id), rngs=nnx.Rngs(0))
    for stage in model.stages:
        if hasattr(stage.mlp, "router"):
            weight = stage.mlp.router.weight
            weight[...] = weight[...] * jnp.linspace(1, 3, weight.shape[1])[None, :, None]
    return model


def finish(figure: Figure, path: Path) -> None:
    """Writes a picture with a grid and a legend in each panel."""
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.legend()
    save_png(figure, path)


CASES = {"fp8": Fp8, "lora": Lora, "balance": Balance}

if __name__ == "__main__":
    main(__doc__, CASES)
