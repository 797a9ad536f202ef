"""Option names of other programs, so that an error can name our option."""

_LORA = {
    "lora": "--lora.rank 32",
    "lora-alpha": "--lora.alpha",
    "lora-dim": "--lora.rank",
    "lora-dropout": "--lora.dropout",
    "lora-r": "--lora.rank",
    "lora-rank": "--lora.rank",
    "lora-target": "--lora.targets",
    "lora-target-linear": "--lora.targets, which by default has all matrices of attention, blocks and experts",
    "lora-target-modules": "--lora.targets",
    "peft-type": "--lora.rank 32",
    "target-modules": "--lora.targets",
    "tuner-type": "--lora.rank 32",
    "use-peft": "--lora.rank 32",
    "use-rslora": "--lora.use-rslora",
}
_QUANTISED = {
    "base": "--weights",
    "load-in-4bit": "--weights nf4",
    "load-in-8bit": '--weights "as stored", for a checkpoint in FP8, or --weights fp8',
    "quant-method": "--weights",
    "quantization-bit": "--weights nf4",
}

_FINETUNE = {
    "adam-weight-decay": "--weight-decay",
    "base-model": "--model",
    "bf16": "--dtype bfloat16, which is the default; --param-dtype and --moment-dtype choose what is stored",
    "block-size": "--seq-len",
    "clip-grad-norm": "--max-grad-norm",
    "cutoff-len": "--seq-len",
    "dataset": "--data",
    "dataset-name": "--data",
    "dataset-path": "--data",
    "dataset-split": "--data owner/name,split=...",
    "dataset-streaming": "--data owner/name,stream=true",
    "early-stopping-patience": "--early-stop",
    "eval-dataset": "--eval-data",
    "eval-steps": "--eval-every",
    "fp32": "--dtype float32",
    "global-batch-size": "--batch-size",
    "grad-accum": "--gradient-accumulation",
    "gradient-accumulation-steps": "--gradient-accumulation, and --batch-size counts the rows of all micro-batches",
    "gradient-checkpointing": "--remat, which is the default",
    "learning-rate-warmup-steps": "--warmup-steps",
    "load-best-model-at-end": "--keep-best",
    "lr": "--learning-rate",
    "mask-history": "--learned-answers last",
    "max-length": "--seq-len",
    "max-samples": "--data owner/name,take=...",
    "max-seq-len": "--seq-len",
    "max-seq-length": "--seq-len",
    "max-steps": "--steps",
    "micro-batch-size": "--batch-size, the rows of an optimizer step, with --gradient-accumulation",
    "model-name": "--model",
    "model-name-or-path": "--model",
    "model-path": "--model",
    "num-epochs": "--epochs",
    "num-steps": "--steps",
    "num-train-epochs": "--epochs",
    "out-dir": "--output",
    "output-dir": "--output",
    "per-device-train-batch-size": "--batch-size, the rows of an optimizer step over all devices",
    "random-seed": "--seed",
    "report-to": "--log-to",
    "save-steps": "--checkpoint-every",
    "save-total-limit": "--keep-checkpoints",
    "sequence-length": "--seq-len",
    "skip-bad-data": "--skip-bad-documents",
    "streaming": "--data owner/name,stream=true",
    "tokenizer-name": "--tokenizer",
    "tokenizer-path": "--tokenizer",
    "train-batch-size": "--batch-size",
    "train-file": "--data",
    "train-steps": "--steps",
    "validation-file": "--eval-data",
    "wd": "--weight-decay",
}

OTHER_NAMES = {
    "finetune": _FINETUNE | _LORA | _QUANTISED,
    "plan": _LORA | _QUANTISED,
    "prefer": _LORA
    | _QUANTISED
    | {
        "beta": "--preference.beta",
        "dataset": "--data",
        "dpo-beta": "--preference.beta",
        "label-smoothing": "--preference.label-smoothing",
        "loss-type": "--preference.loss",
        "lr": "--learning-rate",
        "max-steps": "--steps",
        "output-dir": "--output",
        "pref-beta": "--preference.beta",
        "pref-loss": "--preference.loss",
    },
    "generate": {
        "bf16": "--dtype bfloat16, which is the default",
        "fp32": "--dtype float32",
        "max-length": "--max-new-tokens",
        "max-tokens": "--max-new-tokens",
        "n-predict": "--max-new-tokens",
        "num-tokens": "--max-new-tokens",
        "speculative": "--drafts",
        "temp": "--temperature",
        "tensor-parallel-size": "--devices",
    },
    "bench": {
        "batch-size": "--concurrency",
        "input-len": "--prompt-tokens",
        "max-concurrency": "--concurrency",
        "output-len": "--new-tokens",
        "random-input-len": "--prompt-tokens",
        "random-output-len": "--new-tokens",
    },
    "chat": {
        "max-tokens": "--max-new-tokens",
        "n-predict": "--max-new-tokens",
        "system-prompt": "--system",
        "temp": "--temperature",
    },
    "serve": {
        "enforce-eager": "--lazy",
        "max-model-len": "--max-length",
        "max-num-batched-tokens": "--max-tokens-per-step",
        "max-num-seqs": "--max-sequences",
        "served-model-name": "--name",
    },
}
"""{command: {name in other programs: our option and a note}}."""


def refuse_other_names(command: str, arguments: list[str]) -> None:
    """Raises a ValueError that names our option if an argument is another program's name for it."""
    known = OTHER_NAMES.get(command, {})
    for argument in arguments:
        name = argument.partition("=")[0]
        key = name.removeprefix("--").replace("_", "-").lower()
        if name.startswith("--") and key in known:
            raise ValueError(f"{command} has no {name}; did you mean {known[key]}?")
