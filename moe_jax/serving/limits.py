"""Limits of a serving engine: sequences, tokens of a step, length, pages, queue."""

from dataclasses import dataclass, fields
from numbers import Integral

from moe_jax.kernels.attention.paged import PAGE_SIZE


@dataclass(frozen=True)
class EngineLimits:
    """Sizes that an engine is built for, on each of its devices. They set its memory, and the requests that it refuses.

    Raises:
        ValueError: A limit is no integer of at least 1, or a step has no room for one token of each sequence.
    """

    max_sequences: int = 256
    """Number of sequences that may run at once: slots on the device."""
    max_tokens_per_step: int = 8192
    """Number of tokens of a step: one for each sequence that decodes, the rest for chunks of prompts."""
    max_chunks_per_step: int = 128
    """Number of prompts that a step may compute parts of."""
    max_length: int = 8192
    """Largest number of tokens of a sequence, prompt and new ones."""
    num_pages: int = 4096
    """Number of pages of keys and values, with page 0, which no sequence owns."""
    max_waiting: int = 1024
    """Largest number of sequences that wait for a slot or for pages, on all devices together."""

    @property
    def longest_request(self) -> int:
        """Tokens that a request can have at most, prompt and new ones: as many as `max_length` and all pages allow."""
        return min(self.max_length, self.longest_in_pages)

    @property
    def longest_in_pages(self) -> int:
        """Tokens of the longest sequence that all pages hold. Its last token is sampled and never computed."""
        return (self.num_pages - 1) * PAGE_SIZE + 1

    def __post_init__(self):
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        problems = [
            f"{name} must be an integer, at least 1; got {value!r}"
            for name, value in values.items()
            if not (isinstance(value, Integral) and not isinstance(value, bool) and value >= 1)
        ]
        if not problems and self.max_tokens_per_step < self.max_sequences:
            problems.append(
                f"max_tokens_per_step must be at least max_sequences, one token for each; "
                f"got {self.max_tokens_per_step} and {self.max_sequences}"
            )
        if not problems and self.num_pages < 2:
            problems.append("num_pages must be at least 2, because no sequence owns page 0; got 1")
        if problems:
            raise ValueError("; ".join(problems))
