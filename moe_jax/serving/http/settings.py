"""Settings of the HTTP server."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerSettings:
    """The name that the model is served under, and limits that keep one client from hurting others."""

    model_name: str
    api_key: str | None = None
    """The key that requests must carry, without the space around it; None: none."""
    hosts: tuple[str, ...] = ()
    """Names beyond localhost that the header Host may have, where no key is asked for and only this machine can connect.

    `*`: any name.
    """
    max_body_bytes: int = 8 << 20
    max_choices: int = 128
    """Largest number of continuations that one request may ask for: its prompts times n."""
    max_connections: int = 2048
    body_seconds: float = 30
    """Time in which a request's body must have come."""
    request_seconds: float = 3600
    """Time after which a request is aborted, with what it waits for a slow reader."""
    shutdown_seconds: float = 30
    """Time that running requests have to finish once the server was told to stop."""

    def __post_init__(self):
        if not self.model_name:
            raise ValueError("model_name must not be empty")
        if self.api_key is not None:
            # A header's value comes without the space around it.
            object.__setattr__(self, "api_key", self.api_key.strip())
            if not (self.api_key and self.api_key.isascii() and self.api_key.isprintable()):
                raise ValueError("api_key must be printable ASCII, and not empty")
        names = ("max_body_bytes", "max_choices", "max_connections", "body_seconds", "request_seconds")
        wrong = [name for name in names if not getattr(self, name) > 0]
        wrong += [] if self.shutdown_seconds >= 0 else ["shutdown_seconds"]
        if wrong:
            raise ValueError("; ".join(f"{name} must be above 0; got {getattr(self, name)}" for name in wrong))
