"""`moe-jax chat`: a conversation with a model in the terminal."""

import contextlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import tyro

from moe_jax.commands.loading import LoadingOptions, checked_loading
from moe_jax.commands.options import length_for, tell_programs

if TYPE_CHECKING:
    from moe_jax.serving.conversation import Conversation

HELP = "Ctrl-C ends an answer, Ctrl-D or /quit the conversation. /new begins another conversation, /help prints these lines."


@dataclass(frozen=True)
class ChatCommand:
    """Talk with a model in the terminal. Answers come as they are written.

    moe-jax chat Qwen/Qwen3-30B-A3B

    moe-jax chat runs/demo/model --system "Answer in one sentence." --temperature 0.7

    Args:
      model: a Hugging Face folder or hub id, whose tokenizer has a chat template. Or the output folder of a run:
        its model, or its adapter, which names the weights.
      system: a first message that tells the model how to answer.
      max_new_tokens: maximum number of tokens of an answer. Default: as many as fit into `max_length`.
      max_length: maximum number of tokens of the whole conversation. Default: 8192, or fewer if the model has fewer.
      temperature: 0 takes the most likely token each time. Default: the temperature in generation_config.json if its do_sample
        is true, else 0.
      top_k: sample from the k most likely tokens only. Default: as in generation_config.json.
      top_p: sample from the most likely tokens whose probabilities reach p. Default: as in generation_config.json.
      seed: seed of the sampling. Default: a new one for each answer.
      think: False tells templates such as Qwen3's that the model should answer without thinking first.
      lazy: compile a program when an answer first needs it, instead of all programs at the start.
      drafts: draft tokens, for fewer steps. lookup:3 drafts up to three tokens from the text itself, for any model. Without a
        value, or with module, the model's multi-token prediction module drafts one. The text is the same up to rounding.
      loading: how the model is loaded.
    """

    model: tyro.conf.Positional[str]
    system: str | None = None
    max_new_tokens: int | None = None
    max_length: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    think: bool = True
    lazy: bool = False
    drafts: str | None = None
    loading: tyro.conf.OmitArgPrefixes[LoadingOptions] = LoadingOptions()

    def run(self) -> None:
        """Loads the model, then answers each line of standard input."""
        from moe_jax.adapters.source import source_of
        from moe_jax.checkpoint.hf_load import find_checkpoint, read_config
        from moe_jax.checkpoint.tokenizer import load_tokenizer
        from moe_jax.generation.speculative import draft_source
        from moe_jax.generation.text import chat_prompts
        from moe_jax.serving.conversation import Conversation, model_defaults
        from moe_jax.serving.engine import Engine, check_config, check_drafting
        from moe_jax.serving.request import EngineLimits, SamplingOptions

        source = source_of(self.model, self.loading.adapter)
        folder = find_checkpoint(source.weights)
        mtp = draft_source(self.drafts or 0).name == "module"
        config, tokenizer = read_config(folder, mtp=mtp), load_tokenizer(source.tokenizer or folder)
        template_options = {} if self.think else {"enable_thinking": False}
        # Refuses a tokenizer without a template before weights are read.
        chat_prompts(tokenizer, ["a question"], None, template_options)
        defaults = model_defaults(folder, config, tokenizer)
        given = dict(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
        options = SamplingOptions(
            max_new_tokens=1 if self.max_new_tokens is None else self.max_new_tokens,
            **defaults.sampling | {name: value for name, value in given.items() if value is not None},
            seed=self.seed,
            stop_token_ids=defaults.ends_of_answers,
        )
        if problems := options.problems(config.vocab_size):
            raise ValueError("; ".join(problems))
        length = length_for(config, self.max_length)
        # A page holds 64 tokens, and page 0 none.
        limits = EngineLimits(
            max_sequences=1, max_tokens_per_step=min(2048, length), max_length=length, num_pages=length // 64 + 2, max_waiting=1
        )
        check_drafting(self.drafts or 0, config, limits)
        check_config(config)
        _, load = checked_loading(folder, source.adapter, self.loading, mtp=mtp)
        tell_programs()
        engine_options: dict[str, Any] = dict(drafts=self.drafts or 0, take_over=True, lazy=self.lazy)
        engine = Engine(load(), limits=limits, tokenizer=tokenizer, **engine_options)
        if self.max_new_tokens is None:
            options = replace(options, max_new_tokens=0)
        talk(Conversation(engine, options, system=self.system, template_options=template_options))
        engine.close(drain=False)


def talk(conversation: "Conversation") -> None:
    """Reads messages from standard input, line by line, and prints the answers as they come."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print(HELP, file=sys.stderr)
    for line in _lines(is_terminal):
        if line in ("/quit", "/exit"):
            return
        if line == "/new":
            conversation.clear()
        elif line == "/help":
            print(HELP, file=sys.stderr)
        elif re.match(r"/\w*(\s|$)", line):
            print(f"moe-jax: no command {line.split()[0]}; /help lists them", file=sys.stderr)
        elif line:
            try:
                with contextlib.closing(conversation.answers(line)) as pieces:
                    for piece in pieces:
                        print(piece, end="", flush=True)
            except KeyboardInterrupt:
                print(" ...", end="")
            except ValueError as error:
                print(f"moe-jax: {error}", file=sys.stderr)
                continue
            print()


def _lines(is_terminal: bool) -> Iterator[str]:
    """Yields lines without the space around them, until the end of the input."""
    while True:
        try:
            yield input("> " if is_terminal else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print(file=sys.stderr)
