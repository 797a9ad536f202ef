"""A conversation with a model on an engine, answer by answer; and a model's own options, for requests that set none."""

from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from moe_jax.config import ModelConfig
from moe_jax.generation.text import chat_prompts, text_options
from moe_jax.serving.engine import Engine
from moe_jax.serving.request import SamplingOptions, fitted


class Conversation:
    """The messages so far.

    Args:
      engine: an engine with a tokenizer, whose chat template writes the messages.
      options: for all answers; `max_new_tokens` is an upper bound; 0: the engine's limit.
      system: the text of a system message that tells the model how to answer.
      template_options: further values for the chat template.
    """

    def __init__(
        self,
        engine: Engine,
        options: SamplingOptions,
        *,
        system: str | None = None,
        template_options: Mapping[str, Any] | None = None,
    ):
        self._engine = engine
        self._options = options
        self._template_options = template_options
        self._begin: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._begin)

    def clear(self) -> None:
        """Forgets all messages except the system's."""
        self.messages = list(self._begin)

    def answers(self, text: str) -> Generator[str]:
        """Yields the pieces of the answer to a user's message. The text of an interrupted answer stays in the conversation.

        Raises:
          ValueError: the chat template refuses the conversation, or it has become too long; the message is forgotten.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        (prompt,) = chat_prompts(self._engine.tokenizer, [messages], None, self._template_options)
        handle = self._engine.submit(prompt, fitted(self._options, prompt, self._engine.limits))
        answer = ""
        try:
            for event in handle.events():
                piece = event.text or ""
                answer += piece
                yield piece
        finally:
            handle.abort()
            if answer:
                self.messages = [*messages, {"role": "assistant", "content": answer}]


class Defaults(NamedTuple):
    """A model's own options, for requests that set none."""

    sampling: dict[str, Any]
    """The fields of `SamplingOptions` that control how tokens are drawn."""
    ends: tuple[int, ...] = ()
    """Tokens that end a text."""
    ends_of_answers: tuple[int, ...] = ()
    """Tokens that end an answer in a chat."""


SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def model_defaults(source: str | Path | None, config: ModelConfig, tokenizer: Any, *, draws: bool = False) -> Defaults:
    """Returns the options in generation_config.json, as `text_options` reads them, and the tokens that end texts.

    Raises:
        ValueError: An option is out of its range.
    """
    none = dict.fromkeys(SAMPLING)
    found, answers = (text_options(source, config, tokenizer, none, answers=each, draws=draws) for each in (False, True))
    ends, ends_of_answers = (tuple(each.pop("eos_token_id")) for each in (found, answers))
    if problems := SamplingOptions(**found).problems(config.vocab_size):
        raise ValueError(f"generation_config.json: {'; '.join(problems)}")
    return Defaults(found, ends, ends_of_answers)
