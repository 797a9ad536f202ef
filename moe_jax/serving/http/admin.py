"""Administration, for a key of its own: new weights, pauses, and cached prompts. Paths and fields are prime-rl's and vLLM's."""

from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse

from moe_jax.serving.http.body import ApiError, read_body, refuse_others, take
from moe_jax.serving.http.service import Service


async def answer_admin(service: Service, request: Request) -> JSONResponse:
    """Pauses or resumes the engine, forgets its cached prompts, or reads weights; answers once that is done.

    Requests continue while weights are read.

    Raises:
        ApiError: The folder has no weights of the engine's form, or the engine has failed. Nothing has changed then.
    """
    name, engine = request.url.path.strip("/"), service.engine
    action = {"pause": engine.pause, "resume": engine.resume, "reset_prefix_cache": engine.drop_prefixes}.get(name)
    if action is None:
        body = await read_body(request, service.settings.body_seconds)
        refuse_others(body, {"weight_dir"})
        folder = take(body, "weight_dir", str)
        if folder is None:
            raise ApiError(400, "weight_dir must be a folder on the server", param="weight_dir")
        if service.load is None:
            raise ApiError(400, "this server cannot read new weights", param="weight_dir")
        load = partial(service.load, folder)
        action = lambda: engine.update(load())  # noqa: E731
    try:
        await service.administration.run(action)
    except (ValueError, OSError) as error:
        raise ApiError(400, str(error), param="weight_dir") from error
    except RuntimeError as error:
        raise ApiError(503, str(error)) from error
    return JSONResponse({"status": "ok", "weights_version": engine.stats().weights_version})


PATHS = "/pause", "/resume", "/reset_prefix_cache", "/update_weights"
"""Paths that need the administrator's key."""
