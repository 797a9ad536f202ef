"""Administration, for a key of its own: new weights, adapters, pauses, and cached prompts.

Paths and fields are prime-rl's and vLLM's.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from moe_jax.serving.http.body import ApiError, read_body, refuse_others, take
from moe_jax.serving.http.service import Service


async def answer_admin(service: Service, request: Request) -> JSONResponse:
    """Pauses or resumes the engine, forgets its cached prompts or an adapter, or reads either; answers once that is done.

    Requests continue while files are read.

    Raises:
        ApiError: The folder has no weights of the engine's form or no adapter for it, there is no such adapter, or the engine
            has failed. Nothing has changed then.
    """
    name, engine = request.url.path.strip("/"), service.engine
    action = {"pause": engine.pause, "resume": engine.resume, "reset_prefix_cache": engine.drop_prefixes}.get(name)
    param = "weight_dir" if name == "update_weights" else "lora_path"
    if action is None:
        body = await read_body(request, service.settings.body_seconds)
        action = _change_of_weights(service, body) if name == "update_weights" else _change_of_adapters(service, body, name)
    try:
        await service.administration.run(action)
    except (ValueError, OSError) as error:
        raise ApiError(400, str(error), param=param) from error
    except RuntimeError as error:
        raise ApiError(503, str(error)) from error
    return JSONResponse({"status": "ok", "weights_version": engine.stats().weights_version})


LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

PATHS = "/pause", "/resume", "/reset_prefix_cache", "/update_weights", LOAD_ADAPTER, UNLOAD_ADAPTER
"""Paths that need the administrator's key."""


def _change_of_weights(service: Service, body: dict[str, Any]) -> Callable[[], None]:
    refuse_others(body, {"weight_dir"})
    folder = _text(body, "weight_dir", "a folder on the server")
    if service.load is None:
        raise ApiError(400, "this server cannot read new weights", param="weight_dir")
    load = partial(service.load, folder)
    return lambda: service.engine.update(load())


def _change_of_adapters(service: Service, body: dict[str, Any], path: str) -> Callable[[], None]:
    loads = path == LOAD_ADAPTER.strip("/")
    refuse_others(body, {"lora_name", *(("lora_path", "load_inplace") if loads else ())})
    name = _text(body, "lora_name", "the name of an adapter")
    if not loads:
        if service.check_model(name, "lora_name") is None:
            raise ApiError(400, f"{name!r:.80} is the model itself, not an adapter", param="lora_name")
        return lambda: service.engine.unload_adapter(name)
    loaded = [] if take(body, "load_inplace", bool, False) else [adapter.name for adapter in service.engine.adapters]
    if name in (*service.model_names, *loaded):
        remedy = "load_inplace: true replaces it" if name in loaded else "choose another name"
        raise ApiError(400, f"there is already a model {name!r:.80}: {remedy}", param="lora_name")
    folder = _text(body, "lora_path", "a folder on the server, or a hub id")
    return lambda: service.engine.load_adapter(name, folder)


def _text(body: dict[str, Any], field: str, meaning: str) -> str:
    text = take(body, field, str)
    if not text:
        raise ApiError(400, f"{field} must be {meaning}", param=field)
    return text
