"""Errors of the HTTP API, in the shape that OpenAI's clients read."""

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from moe_jax.serving.http.record import record_of

NAMES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error", 504: "server_error"}
"""The `type` of an error by status; invalid_request_error for others."""


class ApiError(Exception):
    """A request that gets no result; `param` is the field of its body that is wrong, if it is one.

    `closes`: its connection is closed after the answer.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None, closes: bool = False):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.closes = closes

    @property
    def body(self) -> dict:
        """The error as JSON."""
        kind = NAMES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        """The whole answer; an error that passes says when to come again."""
        headers = {"Retry-After": "1"} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.closes:
            headers["Connection"] = "close"
        return JSONResponse(self.body, self.status, headers)


class DisconnectedError(Exception):
    """The client has closed its connection."""


def took_too_long(seconds: float) -> ApiError:
    """Returns the error of a request whose time is over."""
    return ApiError(504, f"the request took longer than {seconds:g} seconds")


async def answer_api_error(request: Request, error: Exception) -> JSONResponse:
    """Answers with an error that an endpoint raised."""
    assert isinstance(error, ApiError)
    record_of(request).error = str(error)
    return error.response


async def answer_http_error(request: Request, error: Exception) -> JSONResponse:
    """Answers for a path or a method that does not exist."""
    assert isinstance(error, HTTPException)
    named = {404: f"there is no {request.url.path}", 405: f"{request.url.path} does not take {request.method}"}
    response = ApiError(error.status_code, named.get(error.status_code, error.detail)).response
    response.headers.update(error.headers or {})
    return response


async def answer_defect(request: Request, error: Exception) -> JSONResponse:
    """Answers for a defect of the server, whose traceback goes into the log and not to the client."""
    # The server will close the connection: a client that did not know would lose its next request there.
    return ApiError(500, "the server failed at this request; its log says why", closes=True).response
