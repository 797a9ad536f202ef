"""Stands before all endpoints: the key, the size of bodies, the end of the server; a line in the log for each request."""

import hmac
import secrets
import time
from collections.abc import Collection

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moe_jax.serving.http.errors import ApiError, DisconnectedError
from moe_jax.serving.http.record import RequestRecord
from moe_jax.serving.http.service import Service, logger

CLIENT_IS_GONE = 499
"""Status in the log of a request whose client did not wait; no client ever sees it."""


class Guard:
    """An ASGI application around another one."""

    def __init__(self, app: ASGIApp, service: Service, paths: Collection[str]):
        self.app = app
        self.service = service
        self.paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs a request, or refuses it, and writes it down."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # The path as the client wrote it: decoded, it could hold a new line for the log.
        path = scope["raw_path"].decode("ascii", "backslashreplace")[:200]
        client = scope["client"][0] if scope.get("client") else "-"
        record = RequestRecord(secrets.token_hex(4), scope["method"], path, client)
        scope["moe_jax.record"] = record

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", record.id.encode())]
            await send(message)

        try:
            self._check(scope)
            await self.app(scope, self._limited(receive), send_noted)
        except ApiError as error:
            record.error = str(error)
            await error.response(scope, receive, send_noted)
        except (DisconnectedError, ClientDisconnect):
            record.error = f"the client went away, with status {record.status or 'not yet sent'}"
            record.status = CLIENT_IS_GONE
        except BaseException as error:
            record.error = f"{type(error).__name__}: {error}"
            record.status = record.status or 500
            raise
        finally:
            self._write_down(scope, record)

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        if self.service.stopping:
            raise ApiError(503, "the server is stopping")
        key = self.service.settings.api_key
        if key is not None and scope["path"] != "/health":
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), key.encode()):
                raise ApiError(401, "the request needs this server's key: Authorization: Bearer KEY", code="invalid_api_key")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.service.settings.max_body_bytes:
            raise self._too_large()

    def _limited(self, receive: Receive) -> Receive:
        size = 0

        async def receive_limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.service.settings.max_body_bytes:
                raise self._too_large()
            return message

        return receive_limited

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self.service.settings.max_body_bytes} bytes")

    def _write_down(self, scope: Scope, record: RequestRecord) -> None:
        seconds = time.perf_counter() - record.began
        known = scope["path"] if scope["path"] in self.paths else "other"
        self.service.metrics.observe(record, known, seconds)
        if known not in ("/health", "/metrics"):
            logger.info("%s", record.line(seconds))
