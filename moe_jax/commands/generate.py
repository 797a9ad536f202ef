"""`moe-jax generate`."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tyro

from moe_jax.commands.options import Dtype, device_count

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
      model: a Hugging Face folder or hub id.
      prompt: the text to continue; its tokenizer adds the special tokens that a text begins with, if any.
      chat: the prompt is what a user says: it goes through the tokenizer's chat template, and the answer alone is printed.
      max_new_tokens: how many tokens to add at most; fewer if a token comes that ends the text (generation_config.json names
        it, or config.json).
      temperature: 0 takes the most likely token each time. Default: the temperature in generation_config.json if that says
        do_sample, else 0.
      top_k: draw from the k most likely tokens alone. Default: as in generation_config.json.
      top_p: draw from the most likely tokens whose probabilities reach p. Default: as in generation_config.json.
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
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    drafts: bool = False
    devices: int | None = None
    dtype: Dtype = "bfloat16"

    def run(self) -> None:
        """Prints prompt and continuation, or the answer."""
        from moe_jax.checkpoint.hf_load import find_checkpoint, from_pretrained, read_config
        from moe_jax.checkpoint.tokenizer import load_tokenizer
        from moe_jax.generation import generate, generate_with_drafts
        from moe_jax.generation.request import checked_request
        from moe_jax.generation.speculative import check_drafts
        from moe_jax.generation.text import added_text, chat_prompts, completion_tokens, text_options
        from moe_jax.runtime.processes import is_first_process

        count = device_count(self.devices)
        folder = find_checkpoint(self.model)
        config = read_config(folder, mtp=self.drafts)
        mesh, tokenizer = self._mesh(count, config), load_tokenizer(folder)
        encode = chat_prompts if self.chat else completion_tokens
        (prompt,) = encode(tokenizer, [self.prompt])
        options: dict[str, Any] = dict(
            max_new_tokens=self.max_new_tokens, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p
        )  # fmt: skip
        options = text_options(folder, config, tokenizer, options, answers=self.chat)
        # What generation would refuse, before minutes of loading.
        checked_request(config, prompt, **options)
        if self.drafts:
            check_drafts(config)
        model = from_pretrained(folder, dtype=self.dtype, mtp=self.drafts, mesh=mesh)
        new: Any
        if self.drafts:
            new, drafts = generate_with_drafts(model, prompt, seed=self.seed, **options)
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
        """Of so many devices; None for one.

        Raises:
          ValueError: some of them would have nothing to do.
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
