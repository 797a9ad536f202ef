"""`moe-jax generate`: continues a prompt, or answers it."""

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import tyro

from moe_jax.commands.loading import LoadingOptions, checked_loading
from moe_jax.commands.options import device_count

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from moe_jax.config import ModelConfig


@dataclass(frozen=True)
class GenerateCommand:
    """Continue a prompt, or answer it.

    moe-jax generate runs/demo/model --prompt "import os" --max-new-tokens 64

    moe-jax generate Qwen/Qwen3-30B-A3B --chat --prompt "Why is the sky blue?" --max-new-tokens 512

    moe-jax generate Qwen/Qwen3-235B-A22B --devices 8 --prompt "import os"

    Args:
      model: a Hugging Face folder or hub id. Or the output folder of a run: its model, or its adapter, which names the weights.
      prompt: the text to continue. The tokenizer adds the special tokens that begin a text, if it has any.
      chat: treat the prompt as a user's message: apply the tokenizer's chat template and print only the answer.
      max_new_tokens: maximum number of new tokens. Generation stops earlier at an end token, which generation_config.json or
        config.json names.
      temperature: 0 takes the most likely token each time. Default: the temperature in generation_config.json if its do_sample
        is true, else 0.
      top_k: sample from the k most likely tokens only. Default: as in generation_config.json.
      top_p: sample from the most likely tokens whose probabilities reach p. Default: as in generation_config.json.
      seed: seed of the sampling.
      drafts: draft tokens, for fewer steps. lookup:3 drafts up to three tokens from the text itself, for any model. Without a
        value, or with module, the model's multi-token prediction module drafts one. The text is the same up to rounding. With
        the module above temperature 0 it is another sample from the same distribution.
      devices: number of GPUs that share the experts, for a model that is too large for one GPU. Default: 1; in a job of several
        processes, all GPUs.
      loading: how the model is loaded.
    """

    model: tyro.conf.Positional[str]
    prompt: str
    chat: bool = False
    max_new_tokens: int = 64
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    drafts: str | None = None
    devices: int | None = None
    loading: tyro.conf.OmitArgPrefixes[LoadingOptions] = LoadingOptions()

    def run(self) -> None:
        """Prints the prompt and its continuation, or the answer."""
        from moe_jax.adapters.source import source_of, vocab_size_with
        from moe_jax.checkpoint.hf_load import find_checkpoint, read_config
        from moe_jax.checkpoint.tokenizer import load_tokenizer
        from moe_jax.generation import generate, generate_with_drafts
        from moe_jax.generation.request import checked_request
        from moe_jax.generation.speculative import check_drafts, draft_source
        from moe_jax.generation.text import added_text, chat_prompts, completion_tokens, text_options
        from moe_jax.runtime.environment import program
        from moe_jax.runtime.processes import is_first_process

        count = device_count(self.devices)
        source = source_of(self.model, self.loading.adapter)
        folder = find_checkpoint(source.weights)
        drafts_from = draft_source(self.drafts or 0)
        mtp = drafts_from.name == "module"
        config = read_config(folder, mtp=mtp)
        config = replace(config, vocab_size=vocab_size_with(source.adapter, config.vocab_size))
        mesh, tokenizer = self._mesh(count, config), load_tokenizer(source.tokenizer or folder)
        encode = chat_prompts if self.chat else completion_tokens
        (prompt,) = encode(tokenizer, [self.prompt])
        options: dict[str, Any] = dict(
            max_new_tokens=self.max_new_tokens, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p
        )  # fmt: skip
        options = text_options(folder, config, tokenizer, options, answers=self.chat)
        # Generation would refuse the same values, but only after minutes of loading.
        checked_request(config, prompt, **options)
        if self.drafts:
            check_drafts(config, drafts_from)
        if source.adapter is not None and mesh is not None:
            merge = f"{program()} convert {source.weights} TARGET --to hf --adapter {source.adapter}"
            raise ValueError(f"an adapter is for one device; write the merged model first: {merge}")
        _, load = checked_loading(folder, source.adapter, self.loading, mtp=mtp, mesh=mesh)
        model = load()
        new: Any
        if self.drafts:
            new, drafts = generate_with_drafts(model, prompt, seed=self.seed, drafts=self.drafts, **options)
        else:
            new = generate(model, prompt, seed=self.seed, **options)
        if not is_first_process():
            return
        added = added_text(tokenizer, prompt, new)
        print(added if self.chat else self.prompt + added)
        if self.drafts:
            rate = f"{drafts.acceptance_rate:.0%}"
            print(f"{drafts.accepted} of {drafts.drafted} drafts were accepted ({rate})", file=sys.stderr)

    def _mesh(self, count: int, config: "ModelConfig") -> "Mesh | None":
        """Returns the mesh of `count` devices; None for one device.

        Raises:
          ValueError: the number of devices does not divide the number of experts, so that some would be idle.
        """
        if count == 1:
            return None
        import jax

        from moe_jax.generation import generation_mesh

        mesh = generation_mesh(jax.devices()[:count], config)
        if mesh.shape["expert"] < count:
            has = f"{config.experts.num_experts} experts" if config.experts and config.moe_layers else "no experts"
            raise ValueError(
                f"--devices must divide the number of experts; {self.model} has {has}, and there are {count} devices"
            )
        return mesh
