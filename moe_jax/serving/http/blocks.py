"""Answers as lists of blocks (a thought, a text, a call), in the forms of agents' APIs: whole, or as events in a stream.

The APIs differ in names. Their requests are translated to bodies of /v1/chat/completions, and run as those do.
"""

import json
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from moe_jax.generation.tool_calls import AnswerPart
from moe_jax.serving.http.answers import ChatAnswer, TextPiece
from moe_jax.serving.http.body import ApiError, refuse_others

Events = list[dict[str, Any]]


@dataclass
class Block:
    """A thought (`reasoning`), a text (`content`) or a `call`; `text` has a call's arguments in JSON."""

    kind: str
    index: int
    text: str = ""
    name: str = ""
    id: str = field(default_factory=lambda: secrets.token_hex(12))


class BlockAnswer(ChatAnswer):
    """The answer to a request with one choice. Subclasses write it in their API's names.

    `_shown` is the answer with the blocks so far. The others are events: before the first block, at a block's beginning, for
    its new text, at its end, and after the last block.

    Attributes:
      fields: the request as its client wrote it.
      blocks: the blocks so far.
      reason: why the answer ended: stop, length or tool_calls; None before.
    """

    def __init__(self, *arguments: Any, fields: Mapping[str, Any], **named: Any):
        super().__init__(*arguments, **named)
        self.fields, self.blocks = fields, list[Block]()
        self.reason: str | None = None

    def _shown(self) -> dict[str, Any]:
        raise NotImplementedError

    def _first_events(self) -> Events:
        raise NotImplementedError

    def _begun(self, block: Block) -> Events:
        raise NotImplementedError

    def _delta(self, block: Block, text: str) -> Events:
        raise NotImplementedError

    def _ended(self, block: Block) -> Events:
        raise NotImplementedError

    def _last_events(self, error: ApiError | None) -> Events:
        raise NotImplementedError

    async def _whole(self, pieces: list[list[TextPiece]]) -> dict[str, Any]:
        for piece in pieces[0]:
            for part in piece.parts:
                for _ in self._added(part):
                    pass
            self.reason = piece.finish_reason
        return self._shown()

    async def _send_all(self, send_data: Callable[[Any], Awaitable[None]]) -> None:
        async def send(events: Events) -> None:
            for event in events:
                await send_data(event)

        async def send_piece(piece: TextPiece) -> None:
            for part in piece.parts:
                for events in self._added(part):
                    await send(events)
            self.reason = piece.finish_reason

        await send(self._first_events())
        await self._follow(send_piece)
        for block in self.blocks[-1:]:
            await send(self._ended(block))
        await send(self._last_events(None))

    def _failure(self, error: ApiError) -> list[Any]:
        return self._last_events(error)

    def _added(self, part: AnswerPart) -> Iterator[Events]:
        """Adds a part to the blocks, and yields its events."""
        if part.call is not None or not self.blocks or self.blocks[-1].kind != part.kind:
            for block in self.blocks[-1:]:
                yield self._ended(block)
            name = part.call.name if part.call else ""
            self.blocks.append(Block(part.kind, len(self.blocks), name=name))
            yield self._begun(self.blocks[-1])
        text = part.text if part.call is None else json.dumps(part.call.arguments, ensure_ascii=False)
        self.blocks[-1].text += text
        yield self._delta(self.blocks[-1], text)


def renamed(fields: Mapping[str, Any], names: Mapping[str, str], others: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that have only another name in a chat's body. `others` are read elsewhere.

    Raises:
        ApiError: The request has a field that is in neither table.
    """
    refuse_others(fields, {*names, *others})
    return {name: fields[own] for own, name in names.items() if own in fields}


def text_of(content: Any, field: str) -> str:
    """Returns a text that may come as a list of {"type": ..., "text": ...}.

    Raises:
        ApiError: It has another form, such as an image.
    """
    parts = [{"text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise ApiError(400, f"{field} must be text, or a list of parts with text; got {content!r:.80}", param=field)
    return "".join(part["text"] for part in parts)
