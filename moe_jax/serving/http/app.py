"""The ASGI application: the endpoints, and what surrounds them."""

import contextlib
from collections.abc import AsyncIterator
from functools import partial

from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from moe_jax.serving.http.chat import answer_chat
from moe_jax.serving.http.completions import answer_completion
from moe_jax.serving.http.errors import ApiError, answer_api_error, answer_defect, answer_http_error
from moe_jax.serving.http.guard import Guard
from moe_jax.serving.http.service import Service
from moe_jax.serving.http.tokens import answer_detokenize, answer_tokenize


def make_app(service: Service) -> ASGIApp:
    """Returns the application that serves OpenAI's API on the service's engine. At its end it closes the service."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await service.close()

    posts = {
        "/v1/completions": answer_completion,
        "/v1/chat/completions": answer_chat,
        "/tokenize": answer_tokenize,
        "/detokenize": answer_detokenize,
    }
    gets = {"/v1/models": _answer_models, "/health": _answer_health, "/metrics": _answer_metrics}
    routes = [Route(path, partial(answer, service), methods=["POST"]) for path, answer in posts.items()]
    routes += [Route(path, partial(answer, service), methods=["GET"]) for path, answer in gets.items()]
    routes.append(Route("/v1/models/{name:path}", partial(_answer_model, service), methods=["GET"]))
    handlers = {ApiError: answer_api_error, HTTPException: answer_http_error, Exception: answer_defect}
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    # A redirect from /metrics/ would name whatever host the request names.
    app.router.redirect_slashes = False
    return Guard(app, service, [*posts, *gets])


async def _answer_models(service: Service, request: Request) -> JSONResponse:
    return JSONResponse({"object": "list", "data": [_model(service)]})


async def _answer_model(service: Service, request: Request) -> JSONResponse:
    service.check_model(request.path_params["name"])
    return JSONResponse(_model(service))


async def _answer_health(service: Service, request: Request) -> JSONResponse:
    """Answers 200 while requests are taken: a proxy then sends some here. Of a server that stops the guard tells."""
    if service.engine.failed:
        raise ApiError(503, "the engine does not run any more")
    return JSONResponse({"status": "ok"})


async def _answer_metrics(service: Service, request: Request) -> Response:
    return Response(generate_latest(service.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})


def _model(service: Service) -> dict:
    return {
        "id": service.settings.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "moe_jax",
        "max_model_len": service.engine.limits.longest_request,
    }
