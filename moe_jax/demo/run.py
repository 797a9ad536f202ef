"""`moe-jax demo`: the library's main workflow on this machine, from raw text to a checkpoint that transformers loads.

It trains a tokenizer and a model of about 3 M parameters (by default a Qwen3-MoE) on the functions of Python's standard
library. Training is interrupted and resumed. The model is exported, compared with transformers, and writes functions. Rewards
then teach it to write valid ones.
"""

import ast
import importlib.util
import json
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax.adapters import LoraSettings, merge_adapter, save_adapter
from moe_jax.checkpoint.hf_load import from_pretrained
from moe_jax.checkpoint.hf_save import save_pretrained
from moe_jax.config import DeepseekV3Config, ModelConfig, Qwen3Config, Qwen3MoeConfig
from moe_jax.demo.text import SPECIAL_TOKENS, TURN_END, as_chat, library_functions, train_tokenizer
from moe_jax.generation import generate
from moe_jax.models.auto import from_config
from moe_jax.models.decoder import Decoder
from moe_jax.models.layers_in_pipe import layers_in_pipe
from moe_jax.parallel.choices import MeshShape
from moe_jax.parallel.pipeline.chunks import PipeShape
from moe_jax.recipes import FinetuneSettings, GrpoSettings, finetune, grpo
from moe_jax.recipes.run.folder import export
from moe_jax.runtime.environment import program
from moe_jax.runtime.files import write_text
from moe_jax.train.plots import plot_run

MAX_LOGIT_DIFFERENCE = 1e-3
"""Largest accepted difference from transformers' logits, relative to the largest logit (f32 gives about 1e-6)."""


@dataclass(frozen=True)
class DemoSettings:
    """Train, resume, export and sample a small model on this machine; the defaults take under 5 minutes on two CPU cores.

    Attributes:
      output: the folder to write to; an earlier demo there is replaced.
      model: the architecture: a mixture of experts (Qwen3's or DeepSeek's), or dense.
      steps: training steps; the run is interrupted after 60 % of them.
      batch_size: sequences in a step.
      seq_len: tokens in a sequence.
      vocab_size: maximum vocabulary of the tokenizer.
      every_nth_file: train only on every n-th file of the library.
      prompt: the beginning of a function, which the trained model completes.
      mesh: number of devices along each mesh axis, as in `moe-jax finetune`. On a CPU the command imitates them.
      pipe_chunks: as in `moe-jax finetune`.
      gradient_accumulation: micro-batches in a step; None: 1, or with a pipe two for each of its ranks.
      lora: train adapters on frozen initial weights, which stay random: they learn less than full training.
      samples: number of completions.
      new_tokens: maximum number of new tokens; a completion stops where the function ends.
      reward_steps: steps of reinforcement learning at the end (GRPO); 0: none.
      seed: seed of the initial weights, the order of the data and the sampling.
    """

    output: str = "runs/demo"
    model: Literal["qwen3_moe", "deepseek_v3", "qwen3"] = "qwen3_moe"
    steps: int = 1100
    batch_size: int = 8
    seq_len: int = 128
    vocab_size: int = 1024
    every_nth_file: int = 1
    mesh: MeshShape = MeshShape()
    pipe_chunks: int = 1
    gradient_accumulation: int | None = None
    lora: LoraSettings | None = None
    prompt: str = "def get_name(self):"
    samples: int = 4
    new_tokens: int = 200
    reward_steps: int = 20
    seed: int = 0


@dataclass(frozen=True)
class DemoResult:
    """The losses of all steps, the relative logit difference from transformers, generated texts, and mean rewards of steps."""

    losses: list[float]
    logit_difference: float
    texts: list[str]
    rewards: list[float]


def run_demo(settings: DemoSettings) -> DemoResult:
    """Runs all stages; prints each stage's results and the paths of its files.

    Raises:
      ValueError: invalid options, for example fewer than 2 steps (nothing could be interrupted); or a mesh of several devices
        without torch. An earlier demo is kept then.
      FileExistsError: the output folder holds files that are not from a demo.
      ArithmeticError: the exported checkpoint has other logits in transformers or, without torch, when it is read again.
    """
    output = Path(settings.output).expanduser()
    with_torch = importlib.util.find_spec("torch") is not None
    check_options(settings, output, with_torch)
    empty_output(output)
    start = time.perf_counter()
    device = jax.devices()[0]
    print(f"moe_jax demo on {jax.device_count()} {device.platform} device(s), {device.device_kind}. Output: {output.resolve()}")

    with stage(1, "Collect text and train a tokenizer"):
        functions = library_functions(settings.every_nth_file)
        write_json_lines(output / "text.jsonl", [{"text": text} for text in functions])
        write_json_lines(output / "chats.jsonl", [as_chat(text) for text in functions[:CHATS]])
        tokenizer = train_tokenizer(functions, settings.vocab_size)
        tokenizer.save_pretrained(output / "tokenizer")
        print(f"  {len(functions):,} short functions of Python's standard library, {sum(map(len, functions)):,} characters")
        print(f"  byte-level BPE with {len(tokenizer)} tokens, and a chat template")

    with stage(2, "Make a small model with random weights"):
        config = small_config(settings.model, len(tokenizer), tokenizer.eos_token_id)
        model = from_config(config, rngs=nnx.Rngs(settings.seed))
        num_parameters = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
        save_pretrained(model, output / "initial", tokenizer_from=output / "tokenizer", progress=False)
        # Every model trained from this one inherits the file.
        ends = {"eos_token_id": [0, SPECIAL_TOKENS.index(TURN_END)], "pad_token_id": 0}  # of a text, and of an answer in a chat
        defaults = ends | {"do_sample": True, "temperature": TEMPERATURE, "top_p": TOP_P}
        write_json_lines(output / "initial" / "generation_config.json", [defaults])
        print(f"  {config.model_type}, {config.num_hidden_layers} layers, {num_parameters / 1e6:.1f} M parameters", end="")
        if experts := config.experts:
            print(f", {experts.num_experts} experts per layer, and each token uses {experts.num_experts_per_tok}", end="")
        print()
        del model

    interrupted_at = settings.steps * 6 // 10 or 1
    with stage(3, f"Train, and interrupt the run after {interrupted_at} of {settings.steps} steps"):
        training = training_settings(settings, output, output / "text.jsonl")
        finetune(training, stop_after=interrupted_at)

    with stage(4, "Resume from the checkpoint on disk"):
        result = finetune(training)
        losses = [record["loss"] for record in result.metrics]
        print(f"  loss {losses[0]:.2f} at step {result.metrics[0]['step']}, {np.mean(losses[-10:]):.2f} over the last 10 steps")
        if "max_mean_expert_load" in result.metrics[-1]:
            busiest = np.mean([record["max_mean_expert_load"] for record in result.metrics[-10:]])
            print(f"  the busiest expert of the worst layer has {busiest:.2f} times the mean load over the last 10 steps")
        plot_run(training.output, output, resumed_at=interrupted_at)

    with stage(5, "Export as a Hugging Face checkpoint"):
        if settings.lora is not None:
            save_adapter(result.model, output / "adapter", tokenizer_from=output / "tokenizer")
            merge_adapter(result.model)
            print("  the adapter alone, and a model with the adapter merged into its weights")
        save_pretrained(result.model, output / "model", tokenizer_from=output / "tokenizer", progress=False)

    other = "transformers" if with_torch else "the trained model"
    with stage(6, f"Load the export, and compare its logits with {other}"):
        tokens = tokenizer.encode("".join(functions[:10]))[: settings.seq_len]
        difference = logit_difference(output / "model", tokens, None if with_torch else result.model)
        print(f"  largest difference {difference:.1e} of the largest logit (accepted: {MAX_LOGIT_DIFFERENCE:.0e})")
        if not difference <= MAX_LOGIT_DIFFERENCE:
            raise ArithmeticError(
                f"the logits of {other} differ by {difference:.1e} of the largest logit; "
                f"at most {MAX_LOGIT_DIFFERENCE:.0e} would be right"
            )
        if not with_torch:
            print(
                f"  not compared with transformers, which needs torch: {program('pip')} install torch, and run the demo again"
            )

    with stage(7, f"Complete {settings.prompt!r}, {settings.samples} times"):
        prompt = tokenizer.encode(settings.prompt)
        writer = result.model
        if settings.mesh.pipe > 1:
            print("  generation does not run through a pipe yet: the export is loaded onto one device and writes")
            writer = from_pretrained(output / "model", dtype=writer.dtype, param_dtype=jnp.float32, progress=False)
        new = generate(
            writer, [prompt] * settings.samples, max_new_tokens=settings.new_tokens, temperature=TEMPERATURE, top_p=TOP_P,
            eos_token_id=tokenizer.eos_token_id, seed=settings.seed,
        )  # fmt: skip
        texts = [str(tokenizer.decode(prompt + tokens, skip_special_tokens=True)) for tokens in new]
        print("\n".join(f"  | {line}" for text in texts for line in [*text.splitlines(), ""]))
        print(f"  {sum(map(is_python, texts))} of {len(texts)} are valid Python")

    rewards: list[float] = []
    with stage(8, f"Teach it by rewards, in {settings.reward_steps} steps, to write valid functions of two statements or more"):
        if settings.reward_steps:
            rewards = teach_by_rewards(settings, output, functions)
            print(f"  {rewards[0]:.0%} of the answers of the first step are right, and {rewards[-1]:.0%} of the last step's")

    print(f"\nDone in {time.perf_counter() - start:.0f} s. The files:")
    for name, content in CONTENTS.items():
        if (output / name).exists():
            print(f"  {output / name!s:32} {content}")
    how = f"up to {difference:.1e} of the largest logit" if difference else "bit for bit"
    print(f"\nThe export computes the logits of {other}, {how}.")
    print("\nTry next: complete a function; teach the model to answer in a chat; and ask it for a function.")
    print("\n".join(f"  {command}" for command in try_next(output)))
    return DemoResult(losses, difference, texts, rewards)


TEMPERATURE, TOP_P = 0.6, 0.8
"""Sampling options of the demo, and of its model's generation_config.json."""

CHATS = 2000
"""Number of functions that are also written as conversations."""

CONTENTS = {
    "loss.png": "the loss of each step",
    "expert_load.png": "how evenly the experts are used",
    "model": "the trained model: Hugging Face safetensors and tokenizer",
    "adapter": "the trained adapter alone, for PEFT too; the model has it in its weights",
    "initial": "the same before training",
    "tokenizer": "the tokenizer alone",
    "training": "metrics.jsonl, expert_load.jsonl and checkpoints of the run",
    "rewarded": "the run that learned from rewards: its model, metrics and samples",
    "text.jsonl": "the training text, one function a line",
    "prompts.jsonl": "the first line of each function, which the run completed",
    "chats.jsonl": "conversations to fine-tune the model on",
}

MAX_FIRST_LINE = 48
"""Characters of the longest first line of a function that the model is asked to complete."""

MARKER = ".moe-jax-demo"
"""Empty file that marks a demo's folder: a user's own folder may also have a text.jsonl or a model."""


def check_options(settings: DemoSettings, output: Path, with_torch: bool) -> None:
    """Validates the demo's settings; raises a ValueError that lists every problem."""
    least = {
        "steps": (2, ", so that the run can be interrupted"),
        "vocab_size": (256 + len(SPECIAL_TOKENS), ": all bytes, and the special tokens"),
        "every_nth_file": (1, ""),
        "samples": (1, ""),
        "new_tokens": (1, ""),
        "reward_steps": (0, ""),
    }
    problems = [
        f"{name} must be at least {bound}{why}; got {getattr(settings, name)}"
        for name, (bound, why) in least.items()
        if getattr(settings, name) < bound
    ]
    if not settings.prompt:
        problems.append("prompt must not be empty")
    if settings.mesh.size > 1 and not with_torch:
        problems.append(
            "on several devices the demo compares its model with transformers', which needs torch: pip install torch"
        )
    config = small_config(settings.model, settings.vocab_size, 0)
    try:
        layers_in_pipe(config, PipeShape(settings.mesh.pipe, settings.pipe_chunks))
    except ValueError as error:
        problems.append(str(error))
    try:
        # The text does not exist yet; these checks accept any file in its place.
        training_settings(settings, output, Path(__file__))
    except ValueError as error:
        problems.append(str(error).removeprefix(f"{FinetuneSettings.__name__}: "))
    if problems:
        raise ValueError("; ".join(problems))


def empty_output(output: Path) -> None:
    """Creates the output folder, or deletes an earlier demo's files in it."""
    if output.exists() and not output.is_dir():
        raise FileExistsError(f"{output} is a file; the demo needs a folder")
    if output.is_dir() and any(output.iterdir()) and not (output / MARKER).is_file():
        raise FileExistsError(f"{output} is not empty and is no earlier demo's output; name another folder")
    output.mkdir(parents=True, exist_ok=True)
    (output / MARKER).touch()
    for name in CONTENTS:
        path = output / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def stage(number: int, title: str) -> Iterator[None]:
    """Context manager that prints a title before a section of the demo, and its seconds after it."""
    print(f"\n[{number}/8] {title}", flush=True)
    start = time.perf_counter()
    yield
    print(f"  {time.perf_counter() - start:.1f} s", flush=True)


def small_config(model: str, vocab_size: int, eos_token_id: int) -> ModelConfig:
    """Returns a config of about 3 M parameters, trainable in minutes on two CPU cores.

    initializer_range is about 1 / sqrt(hidden_size). At the usual 0.02, a model this narrow needs many more steps to leave the
    plateau where it has learned only the frequencies of tokens. A small vocabulary and 3 layers leave time for more steps. In
    equal CPU time, 4096 tokens and 4 layers end at a higher loss per byte.
    """
    common: dict[str, Any] = dict(
        vocab_size=vocab_size, hidden_size=192, intermediate_size=512, num_hidden_layers=3, num_attention_heads=6,
        max_position_embeddings=2048, tie_word_embeddings=True, eos_token_id=eos_token_id, initializer_range=0.06,
    )  # fmt: skip
    if model == "deepseek_v3":
        return DeepseekV3Config(
            **common, num_key_value_heads=6, q_lora_rank=96, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16,
            v_head_dim=32, moe_intermediate_size=96, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2,
            first_k_dense_replace=1, num_nextn_predict_layers=0,
        )  # fmt: skip
    common |= dict(num_key_value_heads=2, head_dim=32)
    if model == "qwen3":
        return Qwen3Config(**common)
    return Qwen3MoeConfig(
        **common, moe_intermediate_size=96, num_experts=16, num_experts_per_tok=4, norm_topk_prob=True,
        router_aux_loss_coef=0.05,
    )  # fmt: skip


def training_settings(settings: DemoSettings, output: Path, data: Path) -> FinetuneSettings:
    """Returns the settings of the demo's training: bf16 compute on a GPU, f32 on a CPU, which has no fast bf16.

    The load-balancing loss averages over layers, so single layers may stay uneven: with this loss alone the busiest expert had
    2.5 times the mean load. The loss within each sequence is a sum over layers, and balances every layer.
    """
    names = "seq_len", "batch_size", "mesh", "pipe_chunks", "lora", "steps", "seed"
    return FinetuneSettings(
        model=str(output / "initial"),
        data=str(data),
        data_format="text",
        output=str(output / "training"),
        gradient_accumulation=settings.gradient_accumulation or (2 * settings.mesh.pipe if settings.mesh.pipe > 1 else 1),
        learning_rate=5e-3,
        sequence_loss_coef=0.03,
        checkpoint_every=settings.steps,
        dtype="bfloat16" if jax.default_backend() == "gpu" else "float32",
        remat=False,
        **{name: getattr(settings, name) for name in names},
    )


def logit_difference(folder: Path, tokens: list[int], trained: Decoder | None = None) -> float:
    """Returns max |ours - theirs| / max |theirs| over the logits of `tokens`, for the checkpoint in `folder`.

    Args:
      trained: the model that computes theirs, on one device; ours are then in its dtype. None: transformers, in f32.
    """
    # By default GPUs multiply f32 in TF32.
    with jax.default_matmul_precision("highest"):
        logits = nnx.jit(lambda model, tokens: model(tokens).logits[0].astype(jnp.float32))
        theirs = transformers_logits(folder, tokens) if trained is None else np.asarray(logits(trained, jnp.array([tokens])))
        dtype = jnp.float32 if trained is None else trained.dtype
        model = from_pretrained(folder, dtype=dtype, param_dtype=jnp.float32, progress=False)
        ours = np.asarray(logits(model, jnp.array([tokens])))
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def transformers_logits(folder: Path, tokens: list[int]) -> np.ndarray:
    """Returns the f32 logits that transformers computes for `tokens`, with the checkpoint in `folder`."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with torch.no_grad():
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            return model(torch.tensor([tokens])).logits[0].numpy()
    finally:
        if shown:
            logging.enable_progress_bar()


def teach_by_rewards(settings: DemoSettings, output: Path, functions: list[str]) -> list[float]:
    """Trains the exported model by rewards (`recipes.grpo`), and exports it; returns the mean reward of each step."""
    # Other signatures have several lines.
    lines = [line for line in dict.fromkeys(text.split("\n")[0] for text in functions) if line.endswith(":")]
    write_json_lines(output / "prompts.jsonl", [{"prompt": line} for line in lines if len(line) <= MAX_FIRST_LINE])
    run = GrpoSettings(
        model=str(output / "model"),
        data=str(output / "prompts.jsonl"),
        output=str(output / "rewarded"),
        steps=settings.reward_steps,
        prompts=8,
        samples=8,
        max_new_tokens=48,
        seq_len=96,
        batch_size=8,
        learning_rate=5e-4,
        warmup_steps=2,
        checkpoint_every=settings.reward_steps,
        dtype="bfloat16" if jax.default_backend() == "gpu" else "float32",
        seed=settings.seed,
    )
    result = grpo(run, rewards=[writes_functions])
    export(result.model, run)
    return [record["reward"] for record in result.metrics]


def writes_functions(
    prompts: Sequence[str], completions: Sequence[str], finish_reasons: Sequence[str], **columns: Any
) -> list[float]:
    """Returns 1 for answers that end and complete a valid function of two different statements or more, else 0.

    Without the second rule a model learns to write `pass`, which is valid too. Neither `pass`, comments nor texts alone count.
    """
    texts = map(str.__add__, prompts, completions)
    ended = (reason == "stop" for reason in finish_reasons)
    return [float(has_ended and num_statements(text) > 1) for has_ended, text in zip(ended, texts, strict=True)]


def num_statements(text: str) -> int:
    """Returns the number of different statements of a function; 0 for text that is not a single valid function."""
    try:
        parsed = ast.parse(text).body
    except (SyntaxError, ValueError):
        return 0
    if len(parsed) != 1 or not isinstance(parsed[0], ast.FunctionDef):
        return 0
    return len({ast.dump(each) for each in parsed[0].body if not _is_idle(each)})


def _is_idle(statement: ast.stmt) -> bool:
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return isinstance(statement, ast.Pass) or is_text


def is_python(text: str) -> bool:
    """Returns True if `text` parses as Python."""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def try_next(output: Path) -> list[str]:
    """Returns three commands that use the trained model, for the shell that the demo runs in."""
    folder, chat = shlex.quote(str(output)), shlex.quote(f"{output}-chat")
    dtype = "" if jax.default_backend() == "gpu" else " --dtype float32"
    command = program()
    return [
        f'{command} generate {folder}/model --prompt "def read_file(path):"{dtype}',
        f"{command} finetune --model {folder}/model --data {folder}/chats.jsonl --output {chat} --steps 60 --batch-size 8 "
        f"--seq-len 256 --learning-rate 1e-3{dtype}",
        f'{command} generate {chat}/model --chat --prompt "Write read_lines(path)."{dtype}',
    ]


def write_json_lines(path: Path, objects: list[dict]) -> None:
    """Writes one object a line; the file is complete or absent."""
    write_text(path, "".join(json.dumps(item) + "\n" for item in objects))
