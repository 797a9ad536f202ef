"""Option names of other programs, so that an error can name our option."""

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
    "eval-dataset": "--eval-data",
    "eval-steps": "--eval-every",
    "fp32": "--dtype float32",
    "global-batch-size": "--batch-size",
    "grad-accum": "--gradient-accumulation",
    "gradient-accumulation-steps": "--gradient-accumulation, and --batch-size counts the rows of all micro-batches",
    "gradient-checkpointing": "--remat, which is the default",
    "learning-rate-warmup-steps": "--warmup-steps",
    "lr": "--learning-rate",
    "mask-history": "--learned-answers last",
    "max-length": "--seq-len",
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
    "save-steps": "--checkpoint-every",
    "save-total-limit": "--keep-checkpoints",
    "sequence-length": "--seq-len",
    "tokenizer-name": "--tokenizer",
    "tokenizer-path": "--tokenizer",
    "train-batch-size": "--batch-size",
    "train-file": "--data",
    "train-steps": "--steps",
    "validation-file": "--eval-data",
    "wd": "--weight-decay",
}

OTHER_NAMES = {
    "finetune": _FINETUNE,
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
