"""`moe-jax convert`: converts a checkpoint between Hugging Face's layout and Orbax, and writes adapters or merges them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from moe_jax.commands.options import Dtype

if TYPE_CHECKING:
    from moe_jax.checkpoint.stored import StoredDtype
    from moe_jax.models.decoder import Decoder
    from moe_jax.train.run_checkpoints import RunCheckpoint


@dataclass(frozen=True)
class ConvertCommand:
    """Convert a checkpoint between Hugging Face's layout and Orbax, checking every tensor on the way.

    moe-jax convert Qwen/Qwen3-30B-A3B out/orbax --to orbax

    moe-jax convert out/orbax out/hf --to hf

    moe-jax convert runs/mine out/hf --to hf --tokenizer Qwen/Qwen3-30B-A3B

    moe-jax convert runs/lora out/merged --merge

    moe-jax convert runs/lora out/adapter --to adapter

    moe-jax convert Qwen/Qwen3-30B-A3B out/fp8 --to hf --fp8

    Args:
      source: a Hugging Face folder or hub id, an Orbax folder that this command wrote, or the output folder of a training run
        that has checkpoints.
      target: the folder to write; it is complete or absent.
      to: the layout to write. "adapter" is PEFT's, for a run that trained an adapter. Default: hf with --merge, else orbax.
      dtype: the dtype of the weights in the target. Default: the source's. FP8 becomes bfloat16; a training run's weights are
        its float32 master weights.
      fp8: write the projections of --to hf in FP8 with a scale for 128 x 128, as the hub has DeepSeek-V3 (docs/fp8.md).
      adapter: a folder or hub id of an adapter (LoRA) that is merged into the source's weights, as by --merge.
      merge: add the adapter that a run trained to its weights, in float32, and round once. The target is then compared with
        the weights and the adapter, tensor by tensor.
      base: the folder or hub id of the weights that a run's adapter belongs to. Default: where the run found them.
      step: the step of a training run's checkpoint. Default: the newest.
      tokenizer: the folder or hub id whose tokenizer files are copied. Default: the source's files, if it has any; for a
        training run, the tokenizer that it was trained with.
    """

    source: tyro.conf.Positional[str]
    target: tyro.conf.Positional[str]
    to: Literal["orbax", "hf", "adapter"] | None = None
    dtype: Dtype | None = None
    fp8: bool = False
    adapter: str | None = None
    merge: bool = False
    base: str | None = None
    step: int | None = None
    tokenizer: str | None = None

    def run(self) -> None:
        """Loads the source and writes the target."""
        from moe_jax.train.model_of_run import trained_adapters
        from moe_jax.train.run_checkpoints import open_run

        if self.fp8 and (self.to != "hf" or self.adapter is not None or self.merge):
            raise ValueError("--fp8 is for --to hf, of weights without an adapter: merge it first, then convert the result")
        if not (Path(self.source).expanduser() / "checkpoints").is_dir():
            if self.step is not None:
                raise ValueError(f"--step is for the output folder of a training run; {self.source} has no checkpoints")
            self._convert_model(None)
            return
        with open_run(self.source, self.step) as checkpoint:
            (self._convert_adapter if trained_adapters(checkpoint) else self._convert_model)(checkpoint)

    def _convert_model(self, run: "RunCheckpoint | None") -> None:
        """Writes a checkpoint, or the model of a run that trained all parameters, perhaps with an adapter merged into it."""
        from moe_jax.adapters import load_adapter
        from moe_jax.checkpoint.hf_load import find_checkpoint, from_pretrained
        from moe_jax.checkpoint.orbax_params import load_orbax
        from moe_jax.checkpoint.quantised import read_quantisation
        from moe_jax.checkpoint.stored import StoredDtype, stored_dtype
        from moe_jax.train import model_of_run

        if self.to == "adapter" or self.base is not None or (self.merge and self.adapter is None):
            raise ValueError(
                "--to adapter, --merge and --base are for the output folder of a run that trained an adapter, which "
                f"{self.source} is not; --adapter merges the adapter of a folder"
            )
        is_orbax = (Path(self.source).expanduser() / "params").is_dir()
        source = self.source if run or is_orbax else find_checkpoint(self.source)
        stored = StoredDtype("float32") if run else stored_dtype(source)
        dtype = self.dtype or stored.name

        def load() -> "Decoder":
            if run:
                return model_of_run(source, step=run.step, dtype=dtype)
            if is_orbax:
                return load_orbax(source, dtype=dtype)
            # FP8 stays as it is. Adapters do not support multi-token prediction modules.
            kept = self.fp8 and read_quantisation(Path(source)) == ("fp8", (128, 128))
            return from_pretrained(source, dtype=dtype, mtp=not self.adapter, weights="as stored" if kept else "whole")

        adapter = self.adapter
        self._write(load, stored, None if adapter is None else lambda model: load_adapter(model, adapter))

    def _convert_adapter(self, run: "RunCheckpoint") -> None:
        """Writes a run's adapter, or its base weights with the adapter merged into them."""
        from moe_jax.adapters import save_adapter
        from moe_jax.checkpoint.hf_load import find_checkpoint, from_pretrained
        from moe_jax.checkpoint.stored import stored_dtype
        from moe_jax.train.model_of_run import BASE, adapters_alone, add_adapters, checked_base
        from moe_jax.train.starting_weights import MODEL

        if self.adapter is not None or (self.to == "adapter") == self.merge:
            raise ValueError(
                f"{self.source} trained an adapter: give either --to adapter, for the adapter alone, or --merge, for its "
                "weights with the adapter added"
            )
        if self.to == "adapter":
            noted = run.position["identity"].get(MODEL)
            save_adapter(
                adapters_alone(run),
                self.target,
                base=self.base or run.position.get(BASE),
                base_weights=noted if isinstance(noted, str) else None,
                **self._companions(),
            )
            print(f"wrote {self.target}: the adapter of step {run.step}")
            return
        base = find_checkpoint(checked_base(run, self.base))
        stored = stored_dtype(base)

        def load() -> "Decoder":
            return from_pretrained(base, dtype=self.dtype or stored.name, mtp=False)

        self._write(load, stored, lambda model: add_adapters(model, run))

    def _write(
        self, load: Callable[[], "Decoder"], stored: "StoredDtype", adapt: Callable[["Decoder"], Any] | None = None
    ) -> None:
        """Writes the model; adapters that `adapt` adds to it are merged into its weights."""
        from moe_jax.adapters.merge import write_merged
        from moe_jax.checkpoint.hf_save import save_pretrained
        from moe_jax.checkpoint.orbax_params import save_orbax

        if self.dtype is None and stored.remark:
            print(stored.remark)
        replaces = (Path(self.target).expanduser() / "config.json").is_file()
        save = save_pretrained if (self.to or ("hf" if self.merge else "orbax")) == "hf" else save_orbax
        if adapt is None:
            options = self._companions() | ({"fp8": True} if self.fp8 else {})
            save(load(), self.target, **options)
        else:
            write_merged(load, adapt, save, self.target, **self._companions())
        dtype = self.dtype or stored.name
        rounded = f", rounded from {stored.name}" if dtype not in (stored.name, "float32") else ""
        replaced = "; the checkpoint that was there is replaced" if replaces else ""
        print(f"wrote {self.target} in {'FP8 and ' if self.fp8 else ''}{dtype}{rounded}{replaced}")

    def _companions(self) -> dict[str, Any]:
        """Returns the tokenizer to write, and the chat template that replaces its own."""
        from moe_jax.recipes.run.folder import chosen_template

        run = Path(self.source).expanduser()
        if not (run / "checkpoints").is_dir():
            return {"tokenizer_from": self.tokenizer, "chat_template": None}
        return {"tokenizer_from": self.tokenizer or _tokenizer_of_run(run), "chat_template": chosen_template(run)}


def _tokenizer_of_run(output: Path) -> str | None:
    """Returns the folder or hub id of the run's tokenizer; if its files are missing, prints a note and returns None."""
    from moe_jax.checkpoint.companions import tokenizer_files
    from moe_jax.recipes.run.folder import noted_tokenizer

    named = noted_tokenizer(output)
    try:
        tokenizer_files(named, None)
    except FileNotFoundError as error:
        print(f"no tokenizer is written; name one with --tokenizer: {error}")
        return None
    return named
