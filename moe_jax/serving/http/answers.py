"""Sends the choices of a request: in one answer at the end, or as a stream of server-sent events."""

import asyncio
import itertools
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from moe_jax.serving.http.choices import Choice, TextPiece, follow
from moe_jax.serving.http.errors import ApiError, DisconnectedError, took_too_long
from moe_jax.serving.http.record import RequestRecord
from moe_jax.serving.http.service import Service


class Shape(Protocol):
    """The JSON of an endpoint's choices."""

    prefix: str
    """Begins the ids of its answers."""
    whole_object: str
    chunk_object: str

    def choice(self, piece: TextPiece, *, is_first: bool, is_whole: bool) -> dict[str, Any]:
        """Returns a piece of a choice in a stream, or a whole choice."""
        ...


@dataclass
class Answer:
    """The answer to a request whose choices run already; whatever happens, none of them runs on behind it."""

    service: Service
    choices: list[Choice]
    shape: Shape
    delivery: tuple[bool, bool]
    """True for a stream, and for one that ends with the numbers of tokens (`body.delivery`)."""
    record: RequestRecord
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = field(default_factory=lambda: secrets.token_hex(12))

    async def respond(self, request: Request) -> Response:
        """Returns the answer to the client: a stream, or JSON once all choices have ended.

        Raises:
            ApiError: A choice failed, or the time is over.
            DisconnectedError: The client is gone.
        """
        if self.delivery[0]:
            return _EventStream(self._stream, lambda: self.service.release(self.choices))
        pieces: list[list[TextPiece]] = [[] for _ in self.choices]

        async def keep(piece: TextPiece) -> None:
            pieces[piece.index].append(piece)

        try:
            await unless_disconnected(request.receive, self._follow(keep))
        finally:
            self.service.release(self.choices)
        choices = []
        for each in pieces:
            text, logprobs = "".join(piece.text for piece in each), [new for piece in each for new in piece.logprobs]
            whole = replace(each[-1], text=text, logprobs=logprobs)
            choices.append(self.shape.choice(whole, is_first=True, is_whole=True))
            # Each may have thousands of log-probabilities: other requests come in between.
            await asyncio.sleep(0)
        return JSONResponse(self._frame(self.shape.whole_object, choices) | {"usage": self._usage()})

    async def _stream(self, send_data: Callable[[Any], Awaitable[None]]) -> None:
        begun: set[int] = set()
        _, includes_usage = self.delivery
        no_usage = {"usage": None} if includes_usage else {}

        async def send(piece: TextPiece) -> None:
            chunk = self.shape.choice(piece, is_first=piece.index not in begun, is_whole=False)
            begun.add(piece.index)
            await send_data(self._frame(self.shape.chunk_object, [chunk]) | no_usage)

        try:
            await self._follow(send)
            if includes_usage:
                await send_data(self._frame(self.shape.chunk_object, []) | {"usage": self._usage()})
            await send_data("[DONE]")
        except ApiError as error:
            self.record.error = str(error)
            try:
                async with asyncio.timeout(1):
                    await send_data(error.body)
            except TimeoutError:
                raise DisconnectedError from error

    async def _follow(self, emit: Callable[[TextPiece], Awaitable[None]]) -> None:
        """Emits the pieces of all choices as they come."""

        async def noted(piece: TextPiece) -> None:
            self.record.note_piece()
            await emit(piece)

        seconds = self.service.settings.request_seconds
        try:
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
                for _, of_prompt in itertools.groupby(self.choices, lambda choice: choice.handle):
                    group.create_task(follow(list(of_prompt), noted))
        except TimeoutError as error:
            raise took_too_long(seconds) from error
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self.record.new_tokens = sum(choice.num_tokens for choice in self.choices)
            self.record.cached_tokens = sum(choice.cached_tokens for choice in self.choices)

    def _usage(self) -> dict[str, Any]:
        prompt, new = self.record.prompt_tokens, self.record.new_tokens
        cached = {"cached_tokens": self.record.cached_tokens}
        return dict(prompt_tokens=prompt, completion_tokens=new, total_tokens=prompt + new, prompt_tokens_details=cached)

    def _frame(self, kind: str, choices: list) -> dict[str, Any]:
        name = self.service.settings.model_name
        return dict(id=self.shape.prefix + self.id, object=kind, created=self.created, model=name, choices=choices)


class _EventStream(Response):
    """Server-sent events, which end when the client is gone."""

    media_type = "text/event-stream"

    def __init__(self, produce: Callable[[Callable[[Any], Awaitable[None]]], Coroutine], release: Callable[[], None]):
        # No content: its length would be sent too.
        self.status_code, self.background, self.body = 200, None, b""
        self._produce, self._release = produce, release
        self.raw_headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            # Proxies would else collect the events.
            (b"x-accel-buffering", b"no"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_data(data: Any) -> None:
            text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
            await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True})

        async def work() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._produce(send_data)
            await send({"type": "http.response.body", "body": b""})

        try:
            await unless_disconnected(receive, work())
        finally:
            self._release()


async def unless_disconnected[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` and returns its result.

    Raises:
        DisconnectedError: The client went away first; the work was cancelled.
    """

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise DisconnectedError
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
