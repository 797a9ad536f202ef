"""The record of a request: for its line in the log, and for metrics."""

import time
from dataclasses import dataclass, field

from starlette.requests import Request


@dataclass
class RequestRecord:
    """A request from its first byte to its end. Times are seconds of `time.perf_counter`."""

    id: str
    method: str
    path: str
    client: str
    began: float = field(default_factory=time.perf_counter)
    first_piece: float | None = None
    status: int = 0
    error: str | None = None
    """The reason why a stream broke off, or why there was no answer."""
    body_bytes: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0

    def note_piece(self) -> None:
        """Notes that text is on its way."""
        if self.first_piece is None:
            self.first_piece = time.perf_counter()

    @property
    def first_seconds(self) -> float | None:
        """The time to the first text."""
        return None if self.first_piece is None else self.first_piece - self.began

    def line(self, seconds: float) -> str:
        """Returns the request in one line, after so many seconds."""
        parts = [f"{self.client} {self.method} {self.path} {self.status}"]
        if self.prompt_tokens:
            parts.append(f"{self.prompt_tokens} prompt tokens ({self.cached_tokens} cached), {self.new_tokens} new")
        if self.first_seconds is not None:
            parts.append(f"first after {self.first_seconds:.3f} s")
        parts.append(f"{seconds:.3f} s")
        parts += [] if self.error is None else [repr(self.error)[:300]]
        return f"{self.id} " + ", ".join(parts)


def record_of(request: Request) -> RequestRecord:
    """Returns the record that the guard has begun for a request."""
    return request.scope["moe_jax.record"]
