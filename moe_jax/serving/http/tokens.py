"""POST /tokenize and /detokenize: the tokenizer alone."""

from starlette.requests import Request
from starlette.responses import JSONResponse

from moe_jax.generation.text import completion_tokens
from moe_jax.serving.http.body import read_body, refuse_others, take
from moe_jax.serving.http.chat import conversation_encoder
from moe_jax.serving.http.errors import ApiError
from moe_jax.serving.http.record import record_of
from moe_jax.serving.http.service import Service


async def answer_tokenize(service: Service, request: Request) -> JSONResponse:
    """Answers with the tokens of a text as a completion has them, or of a conversation as a chat has them."""
    body, record = await read_body(request, service.settings.body_seconds), record_of(request)
    refuse_others(body, {"chat_template_kwargs", "messages", "model", "prompt", "tool_choice", "tools"})
    service.check_model(body.get("model"))
    if ("prompt" in body) == ("messages" in body):
        raise ApiError(400, "give either prompt or messages")
    if "messages" in body:
        encode = conversation_encoder(service.tokenizer, body)
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
