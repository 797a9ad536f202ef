"""The answer to a request: from the engine's events to choices in JSON, at once or as a stream of server-sent events."""

import asyncio
import functools
import itertools
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from moe_jax.generation.tool_calls import AnswerPart, AnswerParts, Call
from moe_jax.serving.chat import joined
from moe_jax.serving.handle import REPLACEMENT, Handle, ReplicaFailed
from moe_jax.serving.http.body import ApiError, DisconnectedError, took_too_long
from moe_jax.serving.http.record import RequestRecord
from moe_jax.serving.http.service import Choice, Service

ShownToken = tuple[int, float | None, dict[int, float] | None]
"""A token, its log-probability, and the most likely alternatives'. A prompt's first token has only itself."""


@dataclass(frozen=True)
class TextPiece:
    """Text of a choice completed by new tokens."""

    index: int
    text: str
    tokens: list[ShownToken]
    """The tokens since the previous piece, if the request asks for their log-probabilities."""
    finish_reason: str | None
    ids: list[int]
    """The ids of all tokens since the previous piece."""
    parts: list[AnswerPart] = field(default_factory=list)
    """The parts of an answer in a chat that the text completes."""


class Answer:
    """The answer to a request whose choices already run; no choice outlives it.

    `body`: the request's, already checked; `wanted`: its `delivery`.
    """

    prefix: str
    """Prefix of the ids of an endpoint's answers."""
    reasoning_tokens: int | None = None
    """Number of tokens of thoughts; None if the model has none."""
    prompt_is_common = False
    """True: all choices share one prompt, and its fields are next to the list of choices."""
    whole_object: str
    chunk_object: str

    def __init__(
        self,
        service: Service,
        choices: list[Choice],
        body: dict[str, Any],
        record: RequestRecord,
        wanted: tuple[bool, bool, bool],
    ):
        self.service, self.choices, self.body, self.record = service, choices, body, record
        self.is_stream, self.includes_usage, self.returns_ids = wanted
        self.created, self.id = int(time.time()), secrets.token_hex(12)
        self.model_name: str = body.get("model", service.settings.model_name)

    def choice(self, piece: TextPiece, *, is_first: bool, is_whole: bool) -> dict[str, Any]:
        """Returns the JSON of a piece of a choice in a stream, or of a whole choice."""
        raise NotImplementedError

    def read(self, piece: TextPiece) -> TextPiece:
        """Returns a piece as the endpoint shows it."""
        return piece

    def about_prompt(self, index: int) -> dict[str, Any]:
        """Returns the fields about the prompt of a choice that the request asks for: its ids and log-probabilities."""
        handle, found = self.choices[index].handle, dict[str, Any]()
        if self.returns_ids:
            found["prompt_token_ids"] = handle.prompt
        if "prompt_logprobs" in self.body:
            found["prompt_logprobs"] = [scores and self._by_id(scores) for scores in handle.prompt_logprobs]
        return found

    def _by_id(self, scores: dict[int, float]) -> dict[str, dict[str, Any]]:
        tokenizer = self.service.tokenizer
        return {str(token): {"logprob": it, "decoded_token": token_text(tokenizer, token)} for token, it in scores.items()}

    async def respond(self, request: Request) -> Response:
        """Returns the answer to the client: a stream, or JSON once all choices have ended.

        Raises:
            ApiError: A choice failed, or the request timed out.
            DisconnectedError: The client is gone.
        """
        if self.is_stream:
            return _EventStream(self._stream, lambda: self.service.release(self.choices))
        pieces: list[list[TextPiece]] = [[] for _ in self.choices]

        async def keep(piece: TextPiece) -> None:
            pieces[piece.index].append(piece)

        try:
            await unless_disconnected(request.receive, self._follow(keep))
        finally:
            self.service.release(self.choices)
        return JSONResponse(await self._whole(pieces))

    async def _whole(self, pieces: list[list[TextPiece]]) -> dict[str, Any]:
        """Returns the JSON of the whole answer, from the pieces of each choice."""
        choices = []
        for each in pieces:
            text, tokens = "".join(piece.text for piece in each), [new for piece in each for new in piece.tokens]
            ids, parts = [token for piece in each for token in piece.ids], [part for piece in each for part in piece.parts]
            whole = replace(each[-1], text=text, tokens=tokens, ids=ids, parts=parts)
            choices.append(self.choice(whole, is_first=True, is_whole=True))
            # Each may have thousands of log-probabilities: other requests run in between.
            await asyncio.sleep(0)
        answer = self._frame(self.whole_object, choices) | {"usage": self._usage()}
        return answer | (self.about_prompt(0) if self.prompt_is_common else {})

    async def _stream(self, send_data: Callable[[Any], Awaitable[None]]) -> None:
        try:
            await self._send_all(send_data)
        except ApiError as error:
            self.record.error = str(error)
            try:
                async with asyncio.timeout(1):
                    for data in self._failure(error):
                        await send_data(data)
            except TimeoutError:
                raise DisconnectedError from error

    def _failure(self, error: ApiError) -> list[Any]:
        """Returns the last events of a stream that an error ends."""
        return [error.body]

    async def _send_all(self, send_data: Callable[[Any], Awaitable[None]]) -> None:
        """Sends the answer in a stream."""
        begun: set[int] = set()
        no_usage = {"usage": None} if self.includes_usage else {}

        async def send(piece: TextPiece) -> None:
            chunk = self.choice(piece, is_first=piece.index not in begun, is_whole=False)
            if chunk.get("delta") == {} and not (piece.finish_reason or piece.tokens or self.returns_ids):
                return
            about_prompt = self.about_prompt(0) if self.prompt_is_common and not begun else {}
            begun.add(piece.index)
            await send_data(self._frame(self.chunk_object, [chunk]) | no_usage | about_prompt)

        await self._follow(send)
        if self.includes_usage:
            await send_data(self._frame(self.chunk_object, []) | {"usage": self._usage()})
        await send_data("[DONE]")

    async def _follow(self, emit: Callable[[TextPiece], Awaitable[None]]) -> None:
        """Emits the pieces of all choices as they arrive."""

        async def noted(piece: TextPiece) -> None:
            self.record.note_piece()
            await emit(self.read(piece))

        seconds = self.service.settings.request_seconds
        try:
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
                for _, of_prompt in itertools.groupby(self.choices, lambda choice: choice.handle):
                    group.create_task(_follow(list(of_prompt), noted))
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
        usage = dict(prompt_tokens=prompt, completion_tokens=new, total_tokens=prompt + new, prompt_tokens_details=cached)
        thoughts = {"completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens}}
        return usage if self.reasoning_tokens is None else usage | thoughts

    def _frame(self, kind: str, choices: list) -> dict[str, Any]:
        name = self.model_name
        return dict(id=self.prefix + self.id, object=kind, created=self.created, model=name, choices=choices)


class CompletionAnswer(Answer):
    """An answer of /v1/completions; `begins` is the text before each choice."""

    prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __init__(self, *arguments: Any, begins: list[str]):
        super().__init__(*arguments)
        self._begins = begins
        self._offsets = [len(begin) for begin in begins]

    def choice(self, piece: TextPiece, *, is_first: bool, is_whole: bool) -> dict[str, Any]:
        """Returns the JSON of a piece of a choice, or of a whole choice."""
        text, found, tokens = (self._begins[piece.index] if is_first else "") + piece.text, None, piece.tokens
        if "echo" in self.body and "logprobs" in self.body:
            tokens, self._offsets[piece.index] = self._scored_prompt(self.choices[piece.index].handle) + tokens, 0
        if tokens:
            found = completion_logprobs(self.service.tokenizer, tokens, self._offsets[piece.index])
            self._offsets[piece.index] += sum(map(len, found["tokens"]))
        choice: dict[str, Any] = {"index": piece.index, "text": text, "logprobs": found, "finish_reason": piece.finish_reason}
        choice |= {"token_ids": piece.ids} if self.returns_ids else {}
        return choice | (self.about_prompt(piece.index) if is_first else {})

    def _scored_prompt(self, handle: Handle) -> list[ShownToken]:
        """Returns the prompt's tokens as if they were drawn; the first has no log-probability."""
        shows_tops = self.body["logprobs"] > 0
        pairs = zip(handle.prompt, handle.prompt_logprobs, strict=True)
        return [(token, None if scores is None else scores[token], scores if shows_tops else None) for token, scores in pairs]


class ChatAnswer(Answer):
    """An answer of /v1/chat/completions; `parts` separates thoughts and tool calls from the text of each choice."""

    prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    prompt_is_common = True

    def __init__(self, *arguments: Any, parts: list[AnswerParts]):
        super().__init__(*arguments)
        self._parts, self._num_calls, self._num_shown = parts, [0] * len(parts), [0] * len(parts)
        self.reasoning_tokens = 0 if parts[0].splits_thoughts else None

    def read(self, piece: TextPiece) -> TextPiece:
        """Returns a piece with its parts; counts the tokens of thoughts."""
        parts, reason = self._parts[piece.index], piece.finish_reason
        if self.reasoning_tokens is not None and parts.reasoning:
            self.reasoning_tokens += len(piece.ids)
        found, most = [], None if self.body.get("parallel_tool_calls", True) else 1
        for part in parts.add(piece.text, ends=reason is not None):
            if part.call is None or most is None or self._num_calls[piece.index] < most:
                found.append(part)
            self._num_calls[piece.index] += part.call is not None
        reason = "tool_calls" if reason == "stop" and self._num_calls[piece.index] else reason
        return replace(piece, parts=found, finish_reason=reason)

    def choice(self, piece: TextPiece, *, is_first: bool, is_whole: bool) -> dict[str, Any]:
        """Returns the JSON of a piece of a choice, or of a whole choice."""
        found = chat_logprobs(self.service.tokenizer, piece.tokens) if piece.tokens else None
        choice: dict[str, Any] = {"index": piece.index, "logprobs": found, "finish_reason": piece.finish_reason}
        choice |= {"token_ids": piece.ids} if self.returns_ids else {}
        message: dict[str, Any] = {"role": "assistant"} if is_first else {}
        thought, text = joined(piece.parts, "reasoning"), joined(piece.parts, "content")
        calls = [part.call for part in piece.parts if part.call is not None]
        if text or is_first:
            message["content"] = None if is_whole and calls and not text else text
        # Clients of SGLang read the first name, clients of vLLM the second.
        message |= {"reasoning_content": thought, "reasoning": thought} if thought else {}
        if calls:
            first = self._num_shown[piece.index]
            self._num_shown[piece.index] += len(calls)
            numbers: list[dict] = [{} if is_whole else {"index": first + i} for i in range(len(calls))]
            message["tool_calls"] = [number | _call_json(call) for number, call in zip(numbers, calls, strict=True)]
        return choice | ({"message": message | {"refusal": None}} if is_whole else {"delta": message})


def _call_json(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": call.id or f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


async def _follow(choices: Sequence[Choice], emit: Callable[[TextPiece], Awaitable[None]]) -> None:
    """Emits the pieces of all continuations of one prompt until their end.

    Raises:
        ApiError: A continuation was aborted or ended with an error, or the engine failed.
    """
    handle, unsent = choices[0].handle, [list[ShownToken]() for _ in choices]
    try:
        async for each in handle:
            choice = choices[each.index]
            event = choice.read(each)
            reason = event.finish_reason
            if event.token is not None:
                unsent[event.index].append((event.token, event.logprob, event.top_logprobs))
            if reason not in (None, "stop", "length"):
                why = "was aborted" if reason == "abort" else "ended with an error"
                raise ApiError(503 if reason == "abort" else 500, f"the request {why}")
            if event.text or reason:
                new, unsent[event.index] = unsent[event.index], []
                scored = [each for each in new if each[1] is not None]
                await emit(TextPiece(choice.index, event.text or "", scored, reason, [token for token, *_ in new]))
    except RuntimeError as error:
        if handle.error is None:
            raise
        again = isinstance(handle.error, ReplicaFailed)
        raise ApiError(
            503, "a device failed: send the request again" if again else "the engine is no longer running"
        ) from error


class _EventStream(Response):
    """Server-sent events, which stop when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, produce: Callable[[Callable[[Any], Awaitable[None]]], Coroutine], release: Callable[[], None]):
        # No content: its length would be sent too.
        self.status_code, self.background, self.body = 200, None, b""
        self._produce, self._release = produce, release
        self.raw_headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            # Otherwise proxies would buffer the events.
            (b"x-accel-buffering", b"no"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_data(data: Any) -> None:
            text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
            name = f"event: {data['type']}\n" if "type" in data else ""
            await send({"type": "http.response.body", "body": f"{name}data: {text}\n\n".encode(), "more_body": True})

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


def completion_logprobs(tokenizer: Any, tokens: Sequence[ShownToken], offset: int) -> dict[str, Any]:
    """Returns the log-probability lists of a text completion; `offset` is the number of characters before the first token."""
    texts = [token_text(tokenizer, token) for token, *_ in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [logprob for _, logprob, _ in tokens],
        "top_logprobs": [
            _by_text(tokenizer, tops | {token: logprob}) if tops and logprob is not None else None
            for token, logprob, tops in tokens
        ],
        "text_offset": list(itertools.accumulate(map(len, texts[:-1]), initial=offset)),
    }


def _by_text(tokenizer: Any, logprobs: dict[int, float]) -> dict[str, float]:
    """Returns log-probabilities by text. For tokens with equal text (all parts of characters), it keeps the likeliest."""
    found: dict[str, float] = {}
    for token, logprob in logprobs.items():
        text = token_text(tokenizer, token)
        found[text] = max(logprob, found.get(text, logprob))
    return found


def chat_logprobs(tokenizer: Any, tokens: Sequence[ShownToken]) -> dict[str, Any]:
    """Returns the log-probability list of an answer in a chat."""
    content = [
        _entry(tokenizer, token, logprob) | {"top_logprobs": [_entry(tokenizer, *each) for each in (tops or {}).items()]}
        for token, logprob, tops in tokens
    ]
    return {"content": content, "refusal": None}


# Cached: an answer of 1,000 tokens with 20 alternatives needs 21,000 calls, which would delay all streams by a second.
@functools.lru_cache(maxsize=1 << 16)
def token_text(tokenizer: Any, token: int) -> str:
    """Returns the text of a single token."""
    return tokenizer.decode([token])


@functools.lru_cache(maxsize=1 << 16)
def token_bytes(tokenizer: Any, token: int) -> list[int] | None:
    """Returns the bytes of a token, even for part of a character; None if the tokenizer does not expose them."""
    text = token_text(tokenizer, token)
    if REPLACEMENT not in text:
        return list(text.encode())
    piece = tokenizer.convert_ids_to_tokens(token)
    if piece.startswith("<0x"):
        return [int(piece[3:5], 16)]
    table = _byte_of_letter()
    return [table[letter] for letter in piece] if set(piece) <= table.keys() else None


def _entry(tokenizer: Any, token: int, logprob: float | None) -> dict[str, Any]:
    return {"token": token_text(tokenizer, token), "logprob": logprob, "bytes": token_bytes(tokenizer, token)}


@functools.cache
def _byte_of_letter() -> dict[str, int]:
    """Returns the byte of each letter of byte-level BPE: printable bytes map to themselves, others to letters from 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
