"""Runs the HTTP server until a signal, then lets running requests finish within a time limit."""

import asyncio
import ipaddress
import socket
from types import FrameType

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from moe_jax.serving.http.app import make_app
from moe_jax.serving.http.body import ApiError
from moe_jax.serving.http.service import Service, logger

KEEP_ALIVE_SECONDS = 65
"""Time after which a connection without a request is closed. Clients and proxies drop theirs after 5 to 60 seconds.

It must be longer than theirs: a request sent while its connection closes is lost.
"""


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound to an address; until a server runs on it, connections are refused.

    Raises:
        OSError: The address is in use, or does not belong to this machine.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    # Else the port of a server that just ended could not be bound for a minute.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OSError(f"the server cannot listen on {host}:{port}: {error.strerror or error}") from error
    return bound


class Server(uvicorn.Server):
    """Serves until SIGTERM or SIGINT. Then running requests have `shutdown_seconds` to finish; a second signal aborts them."""

    def __init__(self, service: Service):
        settings = service.settings
        config = uvicorn.Config(
            make_app(service),
            http=Connection,
            ws="none",
            log_config=None,
            log_level="warning",
            # The guard writes a line for each request.
            access_log=False,
            # Else the log would show whichever address a client claims in proxy headers.
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            # The last resort: aborted requests end much sooner.
            timeout_graceful_shutdown=int(settings.shutdown_seconds) + 10,
        )
        super().__init__(config)
        self.service = service
        self._at_stop = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._num_aborted = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins the end at a first signal, and aborts all requests at a second one."""
        self._loop.call_soon_threadsafe(self.stop)

    def stop(self) -> None:
        """Refuses new requests, and aborts running ones after their time limit; at once if called again."""
        if self.service.stopping:
            self._abort()
            return
        seconds = self.service.settings.shutdown_seconds
        self._at_stop = len(self.service.running)
        logger.info("stopping: %d running requests have %g seconds to finish", self._at_stop, seconds)
        self.service.stopping = True
        self._deadline = asyncio.get_running_loop().call_later(seconds, self._abort)
        self.should_exit = True

    async def startup(self, sockets=None) -> None:
        """Listens, and logs where."""
        self._loop = asyncio.get_running_loop()
        self.service.connections = self.server_state.connections
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._guard(host)
            logger.info("serving %s on http://%s:%d/v1", self.service.settings.model_name, host, port)

    async def shutdown(self, sockets=None) -> None:
        """Waits for the requests, and logs how many had to be aborted."""
        await super().shutdown(sockets)
        if self._deadline is not None:
            self._deadline.cancel()
        logger.info(
            "stopped: %d running requests finished, %d were aborted", self._at_stop - self._num_aborted, self._num_aborted
        )

    def _guard(self, host: str) -> None:
        """If there is no key: sets the host names that requests may use, or warns that other machines can connect."""
        settings = self.service.settings
        if settings.api_key is not None:
            return
        if not ipaddress.ip_address(host).is_loopback:
            logger.warning("%s can be reached from other machines, and no key is asked for: consider --api-key", host)
        elif "*" not in settings.hosts:
            address = f"[{host}]" if ":" in host else host
            names = "localhost", "127.0.0.1", "[::1]", address, *settings.hosts
            self.service.hosts = frozenset(name.lower() for name in names)

    def _abort(self) -> None:
        self._num_aborted = len(self.service.running)
        self.service.abort_all()


class Connection(H11Protocol):
    """An HTTP connection that closes unless the head of its first or next request arrives within `timeout_keep_alive`.

    uvicorn itself only closes connections that are silent after an answer. One that never sends a whole head would stay open
    forever, and count toward the limit of connections.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the timer for the first head."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Stops the timer at a complete head, and starts it at the first bytes of the next one."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the timer."""
        super().connection_lost(exc)
        self._forget()

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are not HTTP, and closes the connection."""
        if self.cycle is not None:
            # Else a request whose body ends this way would be answered twice.
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
