"""Option names of other programs, so that an error can name our option."""

_LORA = {
    "--lora.rank": "lora-dim lora-r lora-rank",
    "--lora.rank 32": "lora peft-type tuner-type use-peft",
    "--lora.alpha": "lora-alpha",
    "--lora.dropout": "lora-dropout",
    "--lora.targets": "lora-target lora-target-modules target-modules",
    "--lora.targets, which by default has all matrices of attention, blocks and experts": "lora-target-linear",
    "--lora.use-rslora": "use-rslora",
    "--weights": "base quant-method",
    "--weights nf4": "load-in-4bit quantization-bit",
    '--weights "as stored", for a checkpoint in FP8, or --weights fp8': "load-in-8bit",
}
_FINETUNE = {
    "--batch-size": "global-batch-size train-batch-size",
    "--batch-size, the rows of an optimizer step over all devices": "per-device-train-batch-size",
    "--batch-size, the rows of an optimizer step, with --gradient-accumulation": "micro-batch-size",
    "--checkpoint-every": "save-steps",
    "--data": "dataset dataset-name dataset-path train-file",
    "--data owner/name,split=...": "dataset-split",
    "--data owner/name,stream=true": "dataset-streaming streaming",
    "--data owner/name,take=...": "max-samples",
    "--dtype bfloat16, which is the default; --param-dtype and --moment-dtype choose what is stored": "bf16",
    "--dtype float32": "fp32",
    "--early-stop": "early-stopping-patience",
    "--epochs": "num-epochs num-train-epochs",
    "--eval-data": "eval-dataset validation-file",
    "--eval-every": "eval-steps",
    "--gradient-accumulation": "grad-accum",
    "--gradient-accumulation, and --batch-size counts the rows of all micro-batches": "gradient-accumulation-steps",
    "--keep-best": "load-best-model-at-end",
    "--keep-checkpoints": "save-total-limit",
    "--learned-answers last": "mask-history",
    "--learning-rate": "lr",
    "--log-to": "report-to",
    "--max-grad-norm": "clip-grad-norm",
    "--model": "base-model model-name model-name-or-path model-path",
    "--output": "out-dir output-dir",
    "--remat, whose default (auto) recomputes only what does not fit": "gradient-checkpointing",
    "--seed": "random-seed",
    "--seq-len": "block-size cutoff-len max-length max-seq-len max-seq-length sequence-length",
    "--skip-bad-documents": "skip-bad-data",
    "--steps": "max-steps num-steps train-steps",
    "--tokenizer": "tokenizer-name tokenizer-path",
    "--warmup-steps": "learning-rate-warmup-steps",
    "--weight-decay": "adam-weight-decay wd",
}
_OURS = {
    "finetune": _FINETUNE | _LORA,
    "plan": _LORA,
    "prefer": _LORA
    | {
        "--data": "dataset",
        "--learning-rate": "lr",
        "--output": "output-dir",
        "--preference.beta": "beta dpo-beta pref-beta",
        "--preference.label-smoothing": "label-smoothing",
        "--preference.loss": "loss-type pref-loss",
        "--steps": "max-steps",
    },
    "grpo": _LORA
    | {
        "--data": "dataset dataset-name train-files",
        "--epochs": "num-train-epochs total-epochs",
        "--grpo.beta": "beta kl-coef kl-loss-coef",
        "--grpo.clip-high": "clip-ratio-high epsilon-high",
        "--grpo.clip-low": "clip-ratio-low epsilon",
        "--grpo.keep-groups with_spread": "dynamic-sampling filter-groups",
        "--grpo.loss": "loss-type",
        "--grpo.mask-truncated": "mask-truncated-completions",
        "--grpo.temperature": "temperature",
        "--learning-rate": "lr",
        "--max-new-tokens": "max-completion-length max-response-length",
        "--model": "model-name-or-path",
        "--output": "output-dir",
        "--prompts, the prompts of a step": "generation-batch-size train-batch-size",
        "--reward": "custom-reward-function reward-funcs",
        "--samples": "num-generations",
        "--seq-len, which is the length of a prompt with its answer": "max-prompt-length",
        "--steps": "max-steps total-training-steps",
    },
    "generate": {
        "--devices": "tensor-parallel-size",
        "--drafts": "speculative",
        "--dtype bfloat16, which is the default": "bf16",
        "--dtype float32": "fp32",
        "--max-new-tokens": "max-length max-tokens n-predict num-tokens",
        "--temperature": "temp",
    },
    "bench": {
        "--concurrency": "batch-size max-concurrency",
        "--new-tokens": "output-len random-output-len",
        "--prompt-tokens": "input-len random-input-len",
    },
    "chat": {"--max-new-tokens": "max-tokens n-predict", "--system": "system-prompt", "--temperature": "temp"},
    "serve": {
        "--drafts lookup:3": "speculative-config num-speculative-tokens",
        "--lazy": "enforce-eager",
        "--max-length": "max-model-len",
        "--max-sequences": "max-num-seqs",
        "--max-tokens-per-step": "max-num-batched-tokens",
        "--name": "served-model-name",
    },
}
"""{command: {our option and a note: names of it in other programs}}."""

OTHER_NAMES = {
    command: {name: ours for ours, names in table.items() for name in names.split()} for command, table in _OURS.items()
}
"""{command: {name in other programs: our option and a note}}."""


def refuse_other_names(command: str, arguments: list[str]) -> None:
    """Raises a ValueError that suggests our option if an argument is the name it has in another program."""
    known = OTHER_NAMES.get(command, {})
    for argument in arguments:
        name = argument.partition("=")[0]
        key = name.removeprefix("--").replace("_", "-").lower()
        if name.startswith("--") and key in known:
            raise ValueError(f"{command} has no {name}; did you mean {known[key]}?")


def with_draft_source(arguments: list[str]) -> list[str]:
    """Returns the arguments with "module" after a `--drafts` that names no source, and without `--no-drafts`."""
    completed = []
    for argument, following in zip(arguments, [*arguments, ""][1:], strict=True):
        if argument != "--no-drafts":
            completed.append(argument)
        if argument == "--drafts" and following.partition(":")[0] not in ("lookup", "module"):
            completed.append("module")
    return completed
