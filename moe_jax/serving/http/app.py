"""The ASGI application: the endpoints and their guard."""

import contextlib
import hmac
import secrets
import time
from collections.abc import AsyncIterator, Collection
from functools import partial

from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moe_jax import __version__
from moe_jax.generation.text import completion_tokens
from moe_jax.pages.document import document
from moe_jax.serving.chat import prepare
from moe_jax.serving.http import admin
from moe_jax.serving.http.body import ApiError, DisconnectedError, read_body, refuse_others, take
from moe_jax.serving.http.completions import CONVERSATION, answer_chat, answer_completion, chat_request
from moe_jax.serving.http.messages import answer_count, answer_message
from moe_jax.serving.http.record import RequestRecord, record_of
from moe_jax.serving.http.responses import answer_response
from moe_jax.serving.http.service import Service, logger

PROBES = "/health", "/ping"
"""Paths that report the server's state and need no key. SageMaker polls the second."""

PAGE = "/"
"""The path of the page, which needs no key either: a browser cannot send one. The page asks for it."""


def make_app(service: Service) -> ASGIApp:
    """Returns the application that serves OpenAI's API on the service's engine. At its end it closes the service."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await service.close()

    posts = {
        "/v1/completions": answer_completion,
        "/v1/chat/completions": answer_chat,
        "/v1/responses": answer_response,
        "/v1/messages": answer_message,
        "/v1/messages/count_tokens": answer_count,
        "/tokenize": answer_tokenize,
        "/detokenize": answer_detokenize,
    }
    if service.settings.admin_key is not None:
        posts |= dict.fromkeys(admin.PATHS, admin.answer_admin)
    gets = {"/v1/models": _answer_models, "/metrics": _answer_metrics, "/version": _answer_version}
    gets |= dict.fromkeys(PROBES, _answer_health) | ({PAGE: _answer_page} if service.settings.page else {})
    routes = [Route(path, partial(answer, service), methods=["POST"]) for path, answer in posts.items()]
    routes += [Route(path, partial(answer, service), methods=["GET"]) for path, answer in gets.items()]
    routes.append(Route("/v1/models/{name:path}", partial(_answer_models, service), methods=["GET"]))
    handlers = {ApiError: _answer_api_error, HTTPException: _answer_http_error, Exception: _answer_defect}
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    # A redirect from /metrics/ would repeat the host that the request claims.
    app.router.redirect_slashes = False
    guarded = Guard(app, service, [*posts, *gets])
    origins = service.settings.allowed_origins
    # Outermost: a browser asks for permission without a key, and must be able to read the guard's refusals.
    return CORSMiddleware(guarded, origins, ["*"], ["*"], expose_headers=["x-request-id"]) if origins else guarded


async def _answer_models(service: Service, request: Request) -> JSONResponse:
    """Answers with the model named in the path, or with a list of all models."""
    name = request.path_params.get("name")
    service.check_model(name)
    if name is not None:
        return JSONResponse(_model(service, name))
    names = [*service.model_names, *(adapter.name for adapter in service.engine.adapters)]
    return JSONResponse({"object": "list", "data": [_model(service, each) for each in names]})


async def _answer_health(service: Service, request: Request) -> JSONResponse:
    """Answers 200 while requests are accepted, so that proxies route them here. For a stopping server the guard answers."""
    if service.engine.failed:
        raise ApiError(503, "the engine is no longer running")
    return JSONResponse({"status": "ok"})


async def _answer_page(service: Service, request: Request) -> Response:
    page = document("chat")
    return Response(page.html, headers=page.headers)


async def _answer_version(service: Service, request: Request) -> JSONResponse:
    return JSONResponse({"version": __version__})


async def _answer_metrics(service: Service, request: Request) -> Response:
    return Response(generate_latest(service.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})


def _model(service: Service, name: str) -> dict:
    sources = {adapter.name: adapter.source for adapter in service.engine.adapters}
    of_adapter = {"root": sources[name], "parent": service.settings.model_name} if name in sources else {}
    return of_adapter | {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "moe_jax",
        "max_model_len": service.engine.limits.longest_request,
    }


async def answer_tokenize(service: Service, request: Request) -> JSONResponse:
    """Answers with the tokens of a text as in a completion, or of a conversation as in a chat."""
    body, record = await read_body(request, service.settings.body_seconds), record_of(request)
    refuse_others(body, {"model", "prompt", *CONVERSATION})
    service.check_model(body.get("model"))
    if ("prompt" in body) == ("messages" in body):
        raise ApiError(400, "give either prompt or messages")
    if "messages" in body:
        wanted = chat_request(body)

        def encode() -> list[list[int]]:
            return [prepare(service.tokenizer, wanted, lambda: service.engine.grammars).tokens]

    else:
        text = take(body, "prompt", str)

        def encode() -> list[list[int]]:
            return completion_tokens(service.tokenizer, [text]) if text else [[]]

    (tokens,) = await service.encode(encode, record, "messages" if "messages" in body else "prompt")
    return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": service.engine.limits.longest_request})


async def answer_detokenize(service: Service, request: Request) -> JSONResponse:
    """Answers with the text of tokens, special ones too."""
    body, record = await read_body(request, service.settings.body_seconds), record_of(request)
    refuse_others(body, {"model", "tokens"})
    service.check_model(body.get("model"))
    tokens = take(body, "tokens", list)
    if tokens is None or not all(type(token) is int for token in tokens):
        raise ApiError(400, "tokens must be a list of token ids", param="tokens")
    (text,) = await service.decode([tokens], record, "tokens")
    return JSONResponse({"prompt": text})


async def _answer_api_error(request: Request, error: Exception) -> JSONResponse:
    """Answers with an error that an endpoint raised."""
    assert isinstance(error, ApiError)
    record_of(request).error = str(error)
    return error.response


async def _answer_http_error(request: Request, error: Exception) -> JSONResponse:
    """Answers for a path or a method that does not exist."""
    assert isinstance(error, HTTPException)
    named = {404: f"there is no {request.url.path}", 405: f"{request.url.path} does not support {request.method}"}
    response = ApiError(error.status_code, named.get(error.status_code, error.detail)).response
    response.headers.update(error.headers or {})
    return response


async def _answer_defect(request: Request, error: Exception) -> JSONResponse:
    """Answers for a bug in the server; the traceback is logged, not sent to the client."""
    # The server will close the connection: a client that did not know would lose its next request there.
    return ApiError(500, "the server failed on this request; its log has the reason", closes=True).response


MOST_HELD = 1 << 30
"""Total bytes of all requests' bodies above which the server refuses large ones."""

SMALL_BODY = 1 << 16
"""Bytes of a body that is always accepted."""

CLIENT_IS_GONE = 499
"""Status in the log for a request whose client disconnected; no client ever sees it."""


class Guard:
    """An ASGI application around another one."""

    def __init__(self, app: ASGIApp, service: Service, paths: Collection[str]):
        self.app = app
        self.service = service
        self.paths = frozenset(paths)
        self._held = 0
        """Bytes of the bodies of all requests that have not ended."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs a request or refuses it, and logs it."""
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
            await self.app(scope, self._limited(receive, record), send_noted)
        except ApiError as error:
            record.error = str(error)
            await error.response(scope, receive, send_noted)
        except (DisconnectedError, ClientDisconnect):
            record.error = f"the client disconnected; status: {record.status or 'not yet sent'}"
            record.status = CLIENT_IS_GONE
        except BaseException as error:
            record.error = f"{type(error).__name__}: {error}"
            record.status = record.status or 500
            raise
        finally:
            self._held -= record.body_bytes
            self._write_down(scope, record)

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        if b"content-length" in headers and b"transfer-encoding" in headers:
            # A proxy that trusts the length would see two requests where this server sees one (RFC 9112, 6.1).
            raise ApiError(400, "a request has Content-Length or Transfer-Encoding, not both", closes=True)
        if len(self.service.connections) >= self.service.settings.max_connections:
            raise ApiError(503, "the server has no room for another connection", closes=True)
        if self.service.stopping:
            raise ApiError(503, "the server is stopping")
        self._check_host(headers.get(b"host", b"").decode("latin-1"))
        settings = self.service.settings
        key = settings.admin_key if scope["path"] in admin.PATHS else settings.api_key
        if key is not None and scope["path"] not in (*PROBES, PAGE):
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            # Clients of /v1/messages send the key in a header of its own.
            given = given.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
            if not hmac.compare_digest(given, key.encode()):
                whose = "administrator's" if scope["path"] in admin.PATHS else "server's"
                raise ApiError(401, f"the request needs this {whose} key: Authorization: Bearer KEY", code="invalid_api_key")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.service.settings.max_body_bytes:
            raise self._too_large()

    def _check_host(self, host: str) -> None:
        """Refuses other host names: a web page could rebind its name to this address by DNS."""
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        hosts = self.service.hosts
        # A browser always sends the header.
        if hosts is not None and host and name.lower().rstrip(".") not in hosts:
            known = ", ".join(sorted(hosts))
            raise ApiError(
                403, f"the server answers to {known}; got Host: {host:.80} (--hosts adds names, and a key allows all)"
            )

    def _limited(self, receive: Receive, record: RequestRecord) -> Receive:
        async def receive_limited() -> Message:
            message = await receive()
            size = len(message.get("body", b""))
            record.body_bytes += size
            self._held += size
            if record.body_bytes > self.service.settings.max_body_bytes:
                raise self._too_large()
            if record.body_bytes > SMALL_BODY and self._held - record.body_bytes > MOST_HELD:
                raise ApiError(503, "the server has no room for the body now: bodies of other requests fill its memory")
            return message

        return receive_limited

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self.service.settings.max_body_bytes} bytes")

    def _write_down(self, scope: Scope, record: RequestRecord) -> None:
        seconds = time.perf_counter() - record.began
        known = scope["path"] if scope["path"] in self.paths else "other"
        self.service.metrics.observe(record, known, seconds)
        if known not in (*PROBES, "/metrics"):
            logger.info("%s", record.line(seconds))
