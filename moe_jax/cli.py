"""The program `moe-jax`: convert, finetune, plot, plan, launch, generate, check, demo, tune.

Each is a dataclass; tyro makes its options.
"""

import os
import signal
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

Dtype = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True)
class Convert:
    """Convert a checkpoint between Hugging Face's layout and Orbax, checking every tensor on the way.

    moe-jax convert Qwen/Qwen3-30B-A3B out/orbax --to orbax

    moe-jax convert out/orbax out/hf --to hf

    moe-jax convert runs/mine out/hf --to hf --tokenizer Qwen/Qwen3-30B-A3B

    Args:
      source: a Hugging Face folder or hub id, an Orbax folder that this command wrote, or the output folder of a training run
        that has checkpoints.
      target: the folder to write; it is complete or absent.
      to: the layout to write.
      dtype: what the weights are stored as.
      step: of a training run, which checkpoint; default: the newest.
      tokenizer: the folder or hub id whose tokenizer files are copied; default: the source's, if it has some.
    """

    source: tyro.conf.Positional[str]
    target: tyro.conf.Positional[str]
    to: Literal["orbax", "hf"] = "orbax"
    dtype: Dtype = "bfloat16"
    step: int | None = None
    tokenizer: str | None = None

    def run(self) -> None:
        """Loads and writes."""
        from moe_jax.checkpoint.hf_load import from_pretrained
        from moe_jax.checkpoint.hf_save import save_pretrained
        from moe_jax.checkpoint.orbax_params import load_orbax, save_orbax
        from moe_jax.train import model_of_run

        is_run, is_orbax = ((Path(self.source).expanduser() / name).is_dir() for name in ("checkpoints", "params"))
        if self.step is not None and not is_run:
            raise ValueError(f"--step is for the output folder of a training run; {self.source} has no checkpoints")
        if is_run:
            model = model_of_run(self.source, step=self.step, dtype=self.dtype)
        else:
            model = (load_orbax if is_orbax else from_pretrained)(self.source, dtype=self.dtype)
        save = save_orbax if self.to == "orbax" else save_pretrained
        save(model, self.target, tokenizer_from=self.tokenizer)
        print(f"wrote {self.target}")


@dataclass(frozen=True)
class Plot:
    """Draw a training run, done or under way: its loss, and how evenly its experts are loaded.

    moe-jax plot runs/finetune

    moe-jax plot runs/finetune --step 100

    Args:
      run_folder: the output folder of `moe-jax finetune`.
      step: the step whose load is shown expert by expert; default: the last tenth of the run, averaged.
      output: the folder for the pictures; default: the run's.
    """

    run_folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(name="run")]
    step: int | None = None
    output: str | None = None

    def run(self) -> None:
        """Draws, and prints where the pictures are."""
        from moe_jax.plots import plot_run

        for path in plot_run(self.run_folder, self.output, step=self.step):
            print(f"wrote {path}")


@dataclass(frozen=True)
class Generate:
    """Continue a prompt, or answer it.

    moe-jax generate runs/demo/model --prompt "import os" --max-new-tokens 64

    moe-jax generate Qwen/Qwen3-30B-A3B --chat --prompt "Why is the sky blue?" --max-new-tokens 512

    moe-jax generate Qwen/Qwen3-235B-A22B --devices 8 --prompt "import os"

    Args:
      model: a Hugging Face folder or hub id.
      prompt: the text to continue; its tokenizer adds the special tokens that a text begins with, if any.
      chat: the prompt is what a user says: it goes through the tokenizer's chat template, and the answer alone is printed.
      max_new_tokens: how many tokens to add at most; fewer if a token comes that ends the text (generation_config.json names
        it, or config.json).
      temperature: 0 takes the most likely token each time.
      top_k: draw from the k most likely tokens alone.
      top_p: draw from the most likely tokens whose probabilities reach p.
      seed: of the draw.
      drafts: let the model's module for further tokens draft some: fewer passes. The text is the same at temperature 0, up to
        rounding; above it another draw from the same distribution.
      devices: how many GPUs the experts are dealt out to, for a model that is too large for one. Default: one, and in a job of
        several processes all of them.
      dtype: what the model computes in.
    """

    model: tyro.conf.Positional[str]
    prompt: str
    chat: bool = False
    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    drafts: bool = False
    devices: int | None = None
    dtype: Dtype = "bfloat16"

    def run(self) -> None:
        """Prints prompt and continuation, or the answer."""
        from moe_jax.checkpoint.companions import generation_config
        from moe_jax.checkpoint.hf_load import from_pretrained
        from moe_jax.generation import generate, generate_with_drafts
        from moe_jax.parallel.processes import is_first_process
        from moe_jax.train import load_tokenizer

        model = from_pretrained(self.model, dtype=self.dtype, mtp=self.drafts, mesh=self._mesh())
        tokenizer = load_tokenizer(str(model.source))
        if self.chat and not tokenizer.chat_template:
            raise ValueError(f"--chat needs a tokenizer with a chat template; that of {self.model} has none")
        if self.chat:
            messages = [{"role": "user", "content": self.prompt}]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        else:
            prompt = tokenizer(self.prompt)["input_ids"]
        options: dict[str, Any] = dict(
            max_new_tokens=self.max_new_tokens, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p,
            eos_token_id=generation_config(model).get("eos_token_id", model.config.eos_token_id), seed=self.seed,
        )  # fmt: skip
        if self.drafts:
            new, drafts = generate_with_drafts(model, prompt, **options)
        else:
            new = generate(model, prompt, **options)
        if not is_first_process():
            return
        print(tokenizer.decode(new if self.chat else prompt + new, skip_special_tokens=True))
        if self.drafts:
            rate = f"{drafts.acceptance_rate:.0%}"
            print(f"{drafts.accepted} of {drafts.drafted} drafts were accepted ({rate})", file=sys.stderr)

    def _mesh(self):
        """Of `devices`; None for one.

        Raises:
          ValueError: so many devices cannot take part, or would have nothing to do.
        """
        import jax

        from moe_jax.checkpoint.hf_load import read_config
        from moe_jax.generation import generation_mesh

        count = _device_count(self.devices)
        if count == 1:
            return None
        config = read_config(self.model, mtp=self.drafts)
        mesh = generation_mesh(jax.devices()[:count], config)
        if mesh.shape["expert"] < count:
            has = f"{getattr(config, 'num_experts', 0)} experts" if config.moe_layers else "no experts"
            raise ValueError(
                f"--devices must divide the number of experts; {self.model} has {has}, and there are {count} devices"
            )
        return mesh


@dataclass(frozen=True)
class Check:
    """Run one forward and one backward pass: next token, loss, gradient norm, seconds, peak memory.

    moe-jax check Qwen/Qwen3-30B-A3B --prompt "The capital of France is"

    moe-jax check Qwen/Qwen3-235B-A22B --devices 8

    moe-jax check --random-config qwen3-30b-a3b --tokens 100

    Args:
      path: a Hugging Face folder or hub id.
      prompt: the text to run on.
      random_config: instead of a checkpoint, random weights of a published shape.
      tokens: with --random-config, how many random tokens.
      layers: with --random-config, take this many layers only.
      devices: how many GPUs the parameters are spread over, and the experts dealt out to, for a model that is too large for
        one. Default: one, and in a job of several processes all of them.
      dtype: what the model computes in.
      repeats: how often each pass is timed; the median is reported.
      json: also write the report to this file.
    """

    path: Annotated[str | None, tyro.conf.Positional] = None
    prompt: str = "The capital of France is"
    random_config: str | None = None
    tokens: int = 100
    layers: int | None = None
    devices: int | None = None
    dtype: Dtype = "bfloat16"
    repeats: int = 5
    json: str | None = None

    def run(self) -> None:
        """Prints the report."""
        import jax

        from moe_jax import check
        from moe_jax.checkpoint.hf_load import read_config
        from moe_jax.config import NAMED_CONFIGS
        from moe_jax.generation import generation_mesh
        from moe_jax.parallel.processes import is_first_process

        if (self.path is None) == (self.random_config is None):
            raise ValueError("give either a checkpoint's path or --random-config NAME")
        if self.path is not None:
            config = read_config(self.path, mtp=False)
        elif self.random_config in NAMED_CONFIGS:
            config = NAMED_CONFIGS[self.random_config]
            config = config if self.layers is None else replace(config, num_hidden_layers=self.layers)
        else:
            raise ValueError(f"no config {self.random_config!r}; there are: {', '.join(NAMED_CONFIGS)}")
        count = _device_count(self.devices)
        mesh = None if count == 1 else generation_mesh(jax.devices()[:count], config)
        options: dict[str, Any] = dict(dtype=self.dtype, mesh=mesh, repeats=self.repeats)
        if self.path is not None:
            report = check.check_checkpoint(self.path, self.prompt, **options)
        else:
            report = check.check_random(config, self.tokens, **options)
        if not is_first_process():
            return
        print(check.format_report(report))
        if self.json is not None:
            _write_json(Path(self.json), asdict(report))


@dataclass(frozen=True)
class Tune:
    """Time the Hopper kernels' tiles for a layer's experts on this GPU and write the fastest into a table.

    moe-jax tune --hidden 2048 --inter 1408 --experts 64 --top-k 6 --tokens 1 64 8192

    moe-jax tune --preset qwen3-30b-a3b deepseek-v3 --output tiles.json

    The kernels take the table that the environment variable MOE_JAX_TILES names. It changes their speed, not their results.

    Args:
      preset: instead of the four sizes, those of published models, one after the other.
      hidden: size of a token.
      inter: size of an expert's activation.
      experts: number of experts.
      top_k: experts that a token chooses.
      tokens: numbers of tokens to measure; those between take the tiles of the nearest.
      dtype: what the kernels compute in.
      output: the table; what it has for other sizes is kept. Default: the file that MOE_JAX_TILES names, else tiles.json.
    """

    preset: tuple[Literal["qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3", "mixtral-8x7b"], ...] = ()
    hidden: int | None = None
    inter: int | None = None
    experts: int | None = None
    top_k: int | None = None
    tokens: tuple[int, ...] = (1, 16, 64, 256, 1024, 4096, 16384)
    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    output: str | None = None

    def run(self) -> None:
        """Prints every time, and writes the table after each layer."""
        from moe_jax import tune
        from moe_jax.kernels.grouped_matmul.mosaic import tiles

        sizes = [size for size in (self.hidden, self.inter, self.experts, self.top_k) if size is not None]
        if len(sizes) != (0 if self.preset else 4):
            raise ValueError("give either --preset NAME or all four of --hidden, --inter, --experts and --top-k")
        layers = [tune.PRESETS[name] for name in self.preset] or [tune.Layer(*sizes)]
        tokens = tuple(dict.fromkeys(self.tokens))
        for layer in layers:
            tune.check(layer, tokens, self.dtype)
        output = Path(self.output or os.environ.get(tiles.ENVIRONMENT_VARIABLE) or "tiles.json")
        # Whatever is wrong with the file is said before minutes of measuring.
        if output.exists():
            tiles.read_table(output)
        output.parent.mkdir(parents=True, exist_ok=True)
        for layer in layers:
            print(f"{layer}, {self.dtype}\n{tune.HEADER}", flush=True)
            winners = []
            for timing in tune.tune(layer, tokens, self.dtype):
                print("\n".join(tune.rows(timing)), flush=True)
                winners.append(tune.entry(timing))
            tiles.merge_into_table(output, winners)
        print(f"wrote {output}; the kernels take it with {tiles.ENVIRONMENT_VARIABLE}={output.resolve()}")


@dataclass(frozen=True)
class Plan:
    """List the meshes on which a training step fits, the fastest first, with predicted time and memory. Needs no GPU.

    moe-jax plan qwen3-30b-a3b --devices 8

    moe-jax plan qwen3-235b-a22b --devices 512 --rows 4096 --moment-dtype bfloat16

    Predictions are for NVIDIA H200; docs/scaling.md says how far they are from what was measured.

    Args:
      config: a published shape (qwen3-30b-a3b, ...) or a folder with a config.json.
      devices: GPUs in all.
      hosts_of: GPUs of one host.
      rows: sequences of one optimizer step over all devices. Default: 32768 tokens a device.
      sequence_length: tokens of each.
      keys_per_token: how many a token sees on average; fewer than half a row where documents are packed.
      remat: whether layers are computed again in the backward pass; by default both are tried, and `--offload` where it helps.
      param_dtype: as in `moe-jax finetune`.
      moment_dtype: as in `moe-jax finetune`.
      expert_load_imbalance: the busiest device's choices over the mean.
      context_method: how attention over a split sequence is computed (`moe-jax finetune` takes the ring).
      hops: as in `moe-jax finetune`. Default: copies where all devices are of one host, whose GPUs one process can have.
      capacity_factor: as in `moe-jax finetune`.
      limit: how many meshes to list.
    """

    config: tyro.conf.Positional[str]
    devices: int
    hosts_of: int = 8
    rows: Annotated[int | None, tyro.conf.arg(aliases=["--batch-size"])] = None
    sequence_length: Annotated[int, tyro.conf.arg(aliases=["--seq-len"])] = 4096
    keys_per_token: float | None = None
    remat: Literal["no", "yes", "offload"] | None = None
    param_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    moment_dtype: Literal["bfloat16", "float32"] = "float32"
    expert_load_imbalance: float = 1.0
    context_method: Literal["ring", "all_gather", "ulysses"] = "ring"
    hops: Literal["nccl", "copies"] | None = None
    capacity_factor: float = 1.25
    limit: int = 10

    def run(self) -> None:
        """Prints the table."""
        from moe_jax import plan
        from moe_jax.config import NAMED_CONFIGS, load_config
        from moe_jax.parallel.machine import H200

        if self.config not in NAMED_CONFIGS and not Path(self.config).is_dir():
            names = ", ".join(NAMED_CONFIGS)
            raise ValueError(f"no config {self.config!r}; give a folder with a config.json, or one of {names}")
        if self.limit < 1:
            raise ValueError(f"limit must be at least 1; got {self.limit}")
        if self.sequence_length < 1:
            raise ValueError(f"sequence_length must be at least 1; got {self.sequence_length}")
        config = NAMED_CONFIGS[self.config] if self.config in NAMED_CONFIGS else load_config(self.config)
        rows = max(1, self.devices * 32768 // self.sequence_length) if self.rows is None else self.rows
        predictions = plan.plan(
            config,
            self.devices,
            rows=rows,
            sequence_length=self.sequence_length,
            remat=None if self.remat is None else plan.REMAT[self.remat],
            machine=replace(H200, gpus_of_host=self.hosts_of),
            param_dtype=self.param_dtype,
            moment_dtype=self.moment_dtype,
            keys_per_token=self.keys_per_token,
            expert_load_imbalance=self.expert_load_imbalance,
            context_method=self.context_method,
            hops=self.hops or ("copies" if self.devices <= self.hosts_of else "nccl"),
            capacity_factor=self.capacity_factor,
        )
        hosts = f"{self.devices} x {H200.name} in hosts of {self.hosts_of}"
        print(f"{self.config}, {hosts}, {rows} x {self.sequence_length} tokens a step; predicted, not measured")
        print(plan.format_plan(predictions, self.limit))


def main(arguments: list[str] | None = None) -> None:
    """Runs one command. Bad input ends with one line on standard error and exit status 2."""
    import jax

    from moe_jax.demo import DemoSettings, run_demo
    from moe_jax.launch import LaunchSettings, launch
    from moe_jax.parallel import environment, processes
    from moe_jax.train import FinetuneSettings

    # Before JAX starts.
    environment.set_defaults(os.environ)

    commands: dict[str, Any] = {
        "convert": Convert,
        "finetune": FinetuneSettings,
        "plot": Plot,
        "plan": Plan,
        "launch": LaunchSettings,
        "generate": Generate,
        "check": Check,
        "demo": DemoSettings,
        "tune": Tune,
    }
    try:
        command = tyro.extras.subcommand_cli_from_dict(
            commands, prog="moe-jax", description=__doc__.split(".")[0] + ".", args=arguments
        )
        if isinstance(command, LaunchSettings):
            if status := launch(command):
                raise SystemExit(status)
            return
        processes.initialize_processes()
        several = jax.distributed.is_initialized()
        if not (several or _takes_several_devices(command)):
            processes.use_one_gpu()
        if isinstance(command, FinetuneSettings):
            _finetune(command)
        elif several and not isinstance(command, Generate | Check):
            raise ValueError("only finetune, generate and check run in several processes; start this command once")
        elif isinstance(command, DemoSettings):
            run_demo(command)
        else:
            command.run()
    except (ValueError, OSError, ArithmeticError, ImportError) as error:
        print(f"moe-jax: {error}", file=sys.stderr)
        processes.leave(2)
    except KeyboardInterrupt:
        print("moe-jax: interrupted", file=sys.stderr)
        processes.leave(128 + signal.SIGINT)


def _takes_several_devices(command: Any) -> bool:
    """By --devices of generate and check, or finetune's mesh."""
    if isinstance(command, Generate | Check):
        return command.devices is not None and command.devices > 1
    return hasattr(command, "mesh") and command.mesh.size > 1


def _finetune(settings: Any) -> None:
    """Trains and exports. A run that was told to stop ends with the status of a program that SIGTERM ended, 143."""
    from moe_jax.parallel import processes
    from moe_jax.train import finetune

    result = finetune(settings)
    first = processes.is_first_process()
    if result.step < settings.steps:
        if first:
            print(f"stopped after step {result.step} and saved; the same command goes on from there", flush=True)
        processes.leave(143)
    folder = Path(settings.output).expanduser() / "model"
    result.model.save_pretrained(folder, tokenizer_from=settings.tokenizer)
    if first:
        print(f"trained to step {result.step}; Hugging Face checkpoint in {folder}")


def _device_count(devices: int | None) -> int:
    """How many of the devices that there are take part.

    Raises:
      ValueError: so many cannot.
    """
    import jax

    if devices is not None and devices < 1:
        raise ValueError(f"--devices must be at least 1; got {devices}")
    there = jax.device_count()
    count = devices if devices is not None else there if jax.process_count() > 1 else 1
    if count > there or (jax.process_count() > 1 and count != there):
        some = "all" if jax.process_count() > 1 else "1 to"
        raise ValueError(f"--devices must be {some} {there}, the devices that there are; got {devices}")
    return count


def _write_json(path: Path, values: dict) -> None:
    import json

    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(values, indent=1) + "\n")
    os.replace(temporary, path)


if __name__ == "__main__":
    main()
