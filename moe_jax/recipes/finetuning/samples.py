"""Samples of a run: prompts that the model continues during training, so that users see more than the loss."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_jax.generation.text import chat, chat_prompts, complete, completion_tokens
from moe_jax.models.decoder import Decoder
from moe_jax.recipes.finetuning.settings import FinetuneSettings
from moe_jax.train.data import Documents


@dataclass(frozen=True)
class Sampler:
    """Generates the samples of a run.

    Attributes:
      as_chat: prompts are a user's messages. Otherwise the model continues them.
      max_tokens: maximum number of tokens of a sample.
    """

    prompts: tuple[str, ...]
    tokenizer: Any
    as_chat: bool
    max_tokens: int

    def __call__(self, model: Decoder) -> list[str]:
        """Returns the most likely continuation of, or answer to, each prompt. Draws no random numbers."""
        function = chat if self.as_chat else complete
        options: dict[str, Any] = dict(tokenizer=self.tokenizer, max_new_tokens=self.max_tokens, temperature=0.0)
        return function(model, list(self.prompts), **options)


def sampler_of(settings: FinetuneSettings, documents: Documents, tokenizer: Any) -> Sampler | None:
    """Returns the sampler of a run, None without prompts. If all data are chats, prompts are user messages.

    Raises:
      ValueError: a prompt, or a file of prompts, is empty, or the chat template refuses it.
    """
    if not settings.sample_prompts:
        return None
    prompts = tuple(prompt for given in settings.sample_prompts for prompt in _prompts(given))
    as_chat = documents.format == "chat" and bool(tokenizer.chat_template)
    encode = chat_prompts if as_chat else completion_tokens
    encode(tokenizer, list(prompts))
    return Sampler(prompts, tokenizer, as_chat, settings.sample_tokens)


def record_of_samples(step: int, prompts: Sequence[str], texts: Sequence[str]) -> dict[str, Any]:
    """Returns the line of samples.jsonl for a step."""
    pairs = [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)]
    return {"step": step, "samples": pairs}


def _prompts(given: str) -> list[str]:
    """Returns the non-empty lines of a prompt file, or the text itself if it names no file."""
    # Paths are not longer than this, and the system raises an error for a long text as a path.
    file = Path(given).expanduser() if len(given) < 256 else None
    lines = file.read_text(encoding="utf-8").splitlines() if file is not None and file.is_file() else [given]
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise ValueError(f"sample_prompts={given!r} holds no prompt: give a text, or a file with a prompt a line")
    return prompts
