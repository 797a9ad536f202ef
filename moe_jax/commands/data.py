"""`moe-jax data`: shows a data set as a model learns it."""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class DataCommand:
    """Show what a model would learn from data: numbers, and the first documents with learned text in green. Needs no GPU.

    moe-jax data chats.jsonl --model Qwen/Qwen3-0.6B

    moe-jax data chats.jsonl,weight=0.7 owner/name,split=train_sft,weight=0.3 --model Qwen/Qwen3-0.6B --seq-len 8192

    All documents are tokenized; no weights are read. If the output is not a terminal, learned text is in [[ ]].

    Args:
      data: as in `moe-jax finetune --data`.
      model: a checkpoint folder or hub id, or a run's output folder, for its tokenizer.
      data_format: as in `moe-jax finetune`.
      learned_answers: as in `moe-jax finetune`.
      empty_thinking: as in `moe-jax finetune`.
      skip_bad_documents: as in `moe-jax finetune`.
      chat_template: as in `moe-jax finetune`.
      seq_len: tokens of a row.
      documents: how many documents of each source to show.
    """

    data: tyro.conf.Positional[tuple[str, ...]]
    model: str
    data_format: str = "auto"
    learned_answers: str = "all"
    empty_thinking: str = "learn"
    skip_bad_documents: bool = False
    chat_template: str | None = None
    seq_len: int = 4096
    documents: int = 3

    def run(self) -> None:
        """Prints the report.

        Raises:
          ValueError, FileNotFoundError, ImportError: the data, the tokenizer or the template cannot be used.
        """
        from moe_jax.checkpoint.tokenizer import load_tokenizer
        from moe_jax.train.data import open_documents
        from moe_jax.train.data.chat_templates import with_chat_template
        from moe_jax.train.data.report import COLORED, PLAIN, report

        if self.seq_len < 2:
            raise ValueError(f"--seq-len must be at least 2; got {self.seq_len}")
        if self.documents < 0:
            raise ValueError(f"--documents must be at least 0; got {self.documents}")
        documents = open_documents(
            self.data,
            self.data_format,
            learned_answers=self.learned_answers,
            empty_thinking=self.empty_thinking,
            skip_bad=self.skip_bad_documents,
        )
        tokenizer = load_tokenizer(_with_tokenizer(self.model))
        if self.chat_template is not None:
            tokenizer = with_chat_template(tokenizer, self.chat_template)
        lines = report(
            documents,
            tokenizer,
            seq_len=self.seq_len,
            skip_bad=self.skip_bad_documents,
            shown=self.documents,
            marks=COLORED if sys.stdout.isatty() else PLAIN,
        )
        for line in lines:
            print(line)


def _with_tokenizer(model: str) -> str:
    """Returns the folder or hub id of the tokenizer: the base's, if the model is a run's folder that has none."""
    folder = Path(model).expanduser()
    if not folder.is_dir() or any(folder.glob("*token*")):
        return model
    # Imports JAX.
    from moe_jax.adapters.source import source_of

    source = source_of(model)
    return source.tokenizer or source.weights
