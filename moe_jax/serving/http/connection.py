"""A connection of the HTTP server, which is closed unless requests begin on it in time; noise gets a JSON error."""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from moe_jax.serving.http.errors import ApiError


class Connection(H11Protocol):
    """Closes itself unless the head of its first request, or of one behind an answer, comes within `timeout_keep_alive`.

    uvicorn closes a connection that is silent behind an answer. One that never brings a whole head would stay for ever, and
    count among the connections that the server may have.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins the time for the first head."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Ends the time with a whole head, and begins it with the first bytes of the next one."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the time."""
        super().connection_lost(exc)
        self._forget()

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are not HTTP, and closes the connection."""
        if self.cycle is not None:
            # A request whose body breaks off so would be answered a second time.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        response = ApiError(400, msg, closes=True).response
        for event in (
            h11.Response(status_code=response.status_code, headers=response.raw_headers),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
