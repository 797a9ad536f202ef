"""Run clients that others wrote against a server, and print one line for each task.

    pip install openai anthropic instructor langchain-openai openai-agents lm-eval
    moe-jax serve Qwen/Qwen3-0.6B --port 8000
    python examples/clients.py --tokenizer Qwen/Qwen3-0.6B

Clients that are not installed are left out. Forms and tool calls are forced by the request, so any model passes, even one with
random weights, if its chat template has tool calls.

    python examples/clients.py --requests 10000 --pid $(pgrep -f "moe-jax serve")

sends requests of all kinds from 64 clients at once instead. Some are wrong, too large, or left by their client. At the end
nothing may be running, all pages must be free or cached, and the server must not have grown in the second half. Programs that
the first requests compile need memory too: run it twice.
"""

import asyncio
import contextlib
import importlib.metadata
import importlib.util
import json
import random
import re
import sys
import traceback
from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

import httpx
import psutil
import pydantic
import tyro


@dataclass(frozen=True)
class Settings:
    """Command-line options."""

    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    """A name from /v1/models; None: the first."""
    key: str = "none"
    tokenizer: str | None = None
    """The model's folder or hub id: lm-eval computes tokens itself."""
    max_tokens: int = 64
    """Longest free text."""
    requests: int = 0
    """Number of requests to send from 64 clients at once, instead of the clients' tasks."""
    pid: int | None = None
    """The server's process, if it runs on this machine: its memory is printed, and must not grow."""


class Place(pydantic.BaseModel):
    """A place. Even random letters of this form end soon. Anthropic's client drops limits of numbers, so there are none."""

    model_config = pydantic.ConfigDict(extra="forbid")
    city: Literal["Paris", "Zürich", "New York"]
    floors: Literal[1, 2, 30]
    is_open: bool


QUESTION = "Where is the Louvre?"
MESSAGES = [{"role": "user", "content": QUESTION}]
FIND = {"name": "find", "description": "Finds a place.", "parameters": Place.model_json_schema()}
TOOLS = [{"type": "function", "function": FIND}]


def openai_client(settings):
    """Returns OpenAI's client of the server."""
    import openai

    return openai.OpenAI(base_url=f"{settings.url}/v1", api_key=settings.key, max_retries=0)


def openai_text(settings):
    """chat, stream with usage, completion with n=2"""
    options = dict(model=settings.model, max_tokens=settings.max_tokens)
    streamed = dict(temperature=0, stream=True, stream_options={"include_usage": True})
    with openai_client(settings) as client:
        whole = client.chat.completions.create(messages=MESSAGES, temperature=0, **options)
        pieces = list(client.chat.completions.create(messages=MESSAGES, **streamed, **options))
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
        assert text == whole.choices[0].message.content
        assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens
        assert len(client.completions.create(prompt="The Louvre is", n=2, **options).choices) == 2


def openai_parse(settings):
    """chat.completions.parse with a pydantic class, whole and streamed"""
    client, options = openai_client(settings), dict(model=settings.model, messages=MESSAGES, response_format=Place)
    assert isinstance(client.chat.completions.parse(**options).choices[0].message.parsed, Place)
    with client.chat.completions.stream(**options) as stream:
        list(stream)
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Place)


def openai_tools(settings):
    """tools with tool_choice required and named, streamed; parse with pydantic_function_tool"""
    import openai

    client, options = openai_client(settings), dict(model=settings.model, messages=MESSAGES)
    for choice in "required", {"type": "function", "function": {"name": "find"}}:
        calls = {}
        for piece in client.chat.completions.create(tools=TOOLS, tool_choice=choice, stream=True, **options):
            for call in piece.choices[0].delta.tool_calls or ():
                calls[call.index] = calls.get(call.index, "") + (call.function.arguments or "")
        assert calls and all(Place.model_validate_json(arguments) for arguments in calls.values())
    parsed = client.chat.completions.parse(tools=[openai.pydantic_function_tool(Place)], tool_choice="required", **options)
    assert all(isinstance(call.function.parsed_arguments, Place) for call in parsed.choices[0].message.tool_calls)


def openai_responses(settings):
    """responses: text, stream, parse with a pydantic class, a forced call and its result"""
    client, options = openai_client(settings).responses, dict(model=settings.model, max_output_tokens=settings.max_tokens)
    assert client.create(input=QUESTION, **options).output_text
    with client.stream(input=QUESTION, **options) as stream:
        assert list(stream)[-1].type in ("response.completed", "response.incomplete")
    assert isinstance(client.parse(input=QUESTION, text_format=Place, model=settings.model).output_parsed, Place)
    tools = [{"type": "function", **FIND}]
    asked = [{"role": "user", "content": QUESTION}]
    found = client.create(input=asked, tools=tools, tool_choice="required", model=settings.model)
    results = [
        {"type": "function_call_output", "call_id": each.call_id, "output": "open"}
        for each in found.output
        if each.type == "function_call"
    ]
    assert results and client.create(input=[*asked, *found.output, *results], tools=tools, **options).output


def anthropic_client(settings):
    """Returns Anthropic's client of the server."""
    import anthropic

    return anthropic.Anthropic(base_url=settings.url, api_key=settings.key, max_retries=0)


def anthropic_text(settings):
    """messages, stream, count_tokens, models"""
    client, options = anthropic_client(settings), dict(model=settings.model, messages=MESSAGES, system="Be short.")
    assert client.messages.create(max_tokens=settings.max_tokens, **options).usage.output_tokens
    with client.messages.stream(max_tokens=settings.max_tokens, **options) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "".join(block.text for block in final.content if block.type == "text")
    assert client.messages.count_tokens(**options).input_tokens > 0
    assert settings.model in [each.id for each in client.models.list()]


def anthropic_tools(settings):
    """tools with tool_choice any and tool, whole and streamed, and a result"""
    client = anthropic_client(settings).messages
    tools = [{"name": "find", "description": "Finds a place.", "input_schema": Place.model_json_schema()}]
    options = dict(model=settings.model, max_tokens=3000, tools=tools)
    found = client.create(messages=MESSAGES, tool_choice={"type": "any"}, **options)
    with client.stream(messages=MESSAGES, tool_choice={"type": "tool", "name": "find"}, **options) as stream:
        streamed = stream.get_final_message()
    for message in found, streamed:
        assert message.stop_reason == "tool_use"
        assert [Place.model_validate(block.input) for block in message.content if block.type == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "open"}
        for block in found.content
        if block.type == "tool_use"
    ]
    talk = [*MESSAGES, {"role": "assistant", "content": found.content}, {"role": "user", "content": results}]
    assert client.create(messages=talk, **options | {"max_tokens": settings.max_tokens}).usage.output_tokens


def anthropic_parse(settings):
    """messages.parse with a pydantic class"""
    client = anthropic_client(settings).messages
    found = client.parse(model=settings.model, max_tokens=3000, messages=MESSAGES, output_format=Place)
    assert isinstance(found.parsed_output, Place)


def instructor_modes(settings):
    """a pydantic class by JSON schema, by tools, streamed, and by Anthropic's tools"""
    import instructor
    from instructor import Mode

    options = dict(messages=MESSAGES, max_retries=0)
    for mode in Mode.JSON_SCHEMA, Mode.TOOLS:
        client = instructor.from_openai(openai_client(settings), mode=mode)
        assert isinstance(client.chat.completions.create(model=settings.model, response_model=Place, **options), Place)
    client = instructor.from_openai(openai_client(settings), mode=Mode.TOOLS)
    *_, last = client.chat.completions.create_partial(model=settings.model, response_model=Place, **options)
    assert Place.model_validate(last.model_dump())
    client = instructor.from_anthropic(anthropic_client(settings))
    assert isinstance(client.messages.create(model=settings.model, response_model=Place, max_tokens=3000, **options), Place)


def langchain(settings, **options):
    """invoke, stream, batch, bind_tools, with_structured_output; also by responses"""
    from langchain_openai import ChatOpenAI

    for responses in False, True:
        make = dict(base_url=f"{settings.url}/v1", api_key=settings.key, model=settings.model, use_responses_api=responses)
        chat = ChatOpenAI(max_tokens=settings.max_tokens, **make)
        assert chat.invoke(QUESTION).usage_metadata["output_tokens"]
        assert sum(len(str(piece.content)) for piece in chat.stream(QUESTION))
        assert len(chat.batch([QUESTION, "Why?"])) == 2
        chat = ChatOpenAI(max_tokens=3000, **make)
        calls = chat.bind_tools([Place], tool_choice="any").invoke(QUESTION).tool_calls
        assert calls and all(Place.model_validate(call["args"]) for call in calls)
        for method in "json_schema", "function_calling":
            assert isinstance(chat.with_structured_output(Place, method=method).invoke(QUESTION), Place), method


def agents(settings):
    """an agent on responses and on chat completions: a forced call, its result, an answer; streamed too"""
    import openai
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )

    set_tracing_disabled(True)
    asked = []

    @function_tool
    def find(place: Place) -> str:
        """Finds a place."""
        asked.append(place)
        return "open"

    async def run():
        client = openai.AsyncOpenAI(base_url=f"{settings.url}/v1", api_key=settings.key, max_retries=0)
        # Long: random weights may think for a thousand tokens before the call. Their answer may be empty.
        forced = ModelSettings(tool_choice="required", max_tokens=3000, parallel_tool_calls=False)
        for model in OpenAIResponsesModel, OpenAIChatCompletionsModel:
            agent = Agent(
                "guide", instructions="Be short.", tools=[find], model_settings=forced, model=model(settings.model, client)
            )
            assert (await Runner.run(agent, QUESTION, max_turns=3)).final_output is not None
            streamed = Runner.run_streamed(agent, QUESTION, max_turns=3)
            assert [event async for event in streamed.stream_events()] and streamed.final_output is not None
        places = Agent("guide", output_type=Place, model=OpenAIResponsesModel(settings.model, client))
        assert isinstance((await Runner.run(places, QUESTION)).final_output, Place)
        await client.close()

    asyncio.run(run())
    assert len(asked) == 4 and all(isinstance(place, Place) for place in asked), asked


def lm_eval(settings):
    """loglikelihood, loglikelihood_rolling and generate_until by local-completions"""
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    model = LocalCompletionsAPI(
        model=settings.model,
        base_url=f"{settings.url}/v1/completions",
        tokenizer=settings.tokenizer or settings.model,
        max_length=512,
        num_concurrent=2,
    )

    def instances(kind, *arguments):
        return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]

    pairs = [("The Louvre is in", " Paris"), ("The Louvre is in", " New York"), ("1 2 3", " 4")]
    for value, is_greedy in model.loglikelihood(instances("loglikelihood", *pairs)):
        assert value < 0 and isinstance(is_greedy, bool)
    assert model.loglikelihood_rolling(instances("loglikelihood_rolling", (QUESTION,)))[0] < 0
    found = model.generate_until(instances("generate_until", (QUESTION, {"until": ["\n\n"], "max_gen_toks": 8})))
    assert isinstance(found[0], str)


TASKS = {
    "openai": [openai_text, openai_parse, openai_tools, openai_responses],
    "anthropic": [anthropic_text, anthropic_tools, anthropic_parse],
    "instructor": [instructor_modes],
    "langchain_openai": [langchain],
    "agents": [agents],
    "lm_eval": [lm_eval],
}
"""Tasks by the module of their client."""

PACKAGES = {"langchain_openai": "langchain-openai", "agents": "openai-agents", "lm_eval": "lm-eval"}


def run_tasks(settings):
    """Runs the tasks of all installed clients; returns those that failed."""
    failed = []
    for module, tasks in TASKS.items():
        name = PACKAGES.get(module, module)
        if importlib.util.find_spec(module) is None:
            print(f"{name:16} is not installed")
            continue
        version = importlib.metadata.version(name)
        for task in tasks:
            try:
                task(settings)
                verdict = "passed"
            except Exception as error:
                traceback.print_exc()
                verdict = f"FAILED: {type(error).__name__}: {str(error)[:300]}"
                failed.append(name)
            print(f"{name:16} {version:7} {verdict}: {task.__doc__}", flush=True)
    return failed


def completion(rng, **changes):
    """Returns the path and the body of a request that continues a text."""
    prompt = " ".join(rng.choices(["The", "Louvre", "is", "in", "Paris", "1", "2"], k=rng.choice([2, 10, 60])))
    return "completions", {"prompt": prompt, "max_tokens": rng.randint(1, 24), "seed": rng.randrange(2**32), **changes}


def chat(rng, path="chat/completions", **changes):
    """Returns the path and the body of a request that answers a question."""
    return path, {"messages": MESSAGES, "max_tokens": rng.randint(1, 24), **changes}


FORM = {"type": "json_schema", "json_schema": {"name": "place", "schema": Place.model_json_schema()}}

MIX = {
    "plain": lambda rng: rng.choice([completion, chat])(rng),
    "long": lambda rng: completion(rng, max_tokens=200, ignore_eos=True),
    "several": lambda rng: rng.choice([completion, chat])(rng, n=2),
    "schema": lambda rng: chat(rng, response_format=FORM, max_tokens=200),
    "regex": lambda rng: completion(rng, structured_outputs={"regex": rng.choice(["[a-c]{3,9}", "(yes|no)!?", r"\d{4}-\d\d"])}),
    "tools": lambda rng: chat(rng, tools=TOOLS, tool_choice="required", max_tokens=300),
    "logprobs": lambda rng: rng.choice([completion(rng, logprobs=3), chat(rng, logprobs=True, top_logprobs=2)]),
    "echo": lambda rng: completion(rng, echo=True, logprobs=1, max_tokens=rng.choice([0, 1])),
    "min_tokens": lambda rng: completion(rng, min_tokens=5, max_tokens=9, bad_words=["Paris"]),
    "stop": lambda rng: completion(rng, stop=["a", "e", "\n"], include_stop_str_in_output=rng.random() < 0.5),
    "message": lambda rng: chat(rng, "messages"),
    "response": lambda rng: ("responses", {"input": QUESTION, "max_output_tokens": rng.randint(1, 24)}),
    "wrong": lambda rng: rng.choice(
        [completion(rng, n=0), chat(rng, max_tokens=-1), completion(rng, what=1), ("messages", {})]
    ),
    "malformed": lambda rng: (rng.choice(["completions", "chat/completions", "responses"]), b'{"prompt": "a", "max_to'),
    "huge": lambda rng: ("completions", b'{"prompt": "' + b"a" * 9_000_000 + b'"}'),
    "too long": lambda rng: completion(rng, prompt="a " * 400_000),
}
"""Requests by kind; each may also be streamed, use an adapter, or be left by its client before its end."""

REFUSED = {"wrong": 400, "malformed": 400, "huge": 413, "too long": 400}


async def one_request(client, settings, number, models):
    """Sends a request, which its number determines, and returns its kind and status."""
    rng = random.Random(number)
    # Large bodies are rarer: they only fill the wire.
    kind = rng.choices([*MIX], [1 if kind in ("huge", "too long") else 10 for kind in MIX])[0]
    path, body = MIX[kind](rng)
    if isinstance(body, dict) and kind not in REFUSED:
        body |= {"model": rng.choice(models)} | ({"stream": True} if rng.random() < 0.5 and kind != "echo" else {})
    data = {"json": body} if isinstance(body, dict) else {"content": body}
    headers = {"Authorization": f"Bearer {settings.key}", "Content-Type": "application/json"}
    text, leaves = b"", kind not in REFUSED and rng.random() < 0.2
    with contextlib.suppress(TimeoutError):
        # A client that leaves may do so before its answer begins, or in the middle of a stream.
        async with asyncio.timeout(rng.uniform(0, 2) if leaves else None):
            async with client.stream("POST", f"/v1/{path}", headers=headers, **data) as response:
                async for piece in response.aiter_raw():
                    text += piece
                    if leaves and b"data:" in text:
                        return f"{kind}, left", 200
            if kind == "schema" and not body.get("stream"):
                choice = json.loads(text)["choices"][0]
                assert choice["finish_reason"] == "length" or Place.model_validate_json(choice["message"]["content"])
            # The status of a stream was sent before it could fail.
            failed = response.status_code == 200 and re.search(rb'"error": ?\{', text)
            return kind, 500 if failed else response.status_code
    return f"{kind}, left", 200


async def soak(settings):
    """Sends many requests from 64 clients; returns the reasons why the server has not survived them."""
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=settings.url, timeout=600, limits=limits) as client:
        models = [each["id"] for each in (await client.get("/v1/models")).json()["data"]]
        before, counts, memory = await gauges(client), Counter(), []
        numbers = iter(range(settings.requests))

        async def work():
            for number in numbers:
                kind, status = await one_request(client, settings, number, models)
                counts[kind, status] += 1
                if counts.total() % max(settings.requests // 20, 1) == 0:
                    memory.append(resident_megabytes(settings.pid))
                    print(f"{counts.total():6} requests, {memory[-1]:.1f} MB", flush=True)

        await asyncio.gather(*(work() for _ in range(64)))
        for _ in range(100):
            after = await gauges(client)
            if after == before:
                break
            await asyncio.sleep(0.1)
        memory.append(resident_megabytes(settings.pid))
        assert models == [each["id"] for each in (await client.get("/v1/models")).json()["data"]]
    for (kind, status), count in sorted(counts.items()):
        print(f"{kind:18} {status} {count:6}")
    half = memory[len(memory) // 2]
    print(f"before {before}\nafter  {after}")
    print(f"memory {memory[0]:.0f} MB at first, {half:.0f} MB at half, {memory[-1]:.0f} MB at the end")
    wrong = [f"{kind}: {status}" for kind, status in counts if status != REFUSED.get(kind, 200)]
    wrong += ["the server still holds what it held during requests"] if after != before else []
    return wrong + (["its memory grows"] if memory[-1] > half + 20 else [])


async def gauges(client):
    """Returns what the server holds now: sequences, and pages that they own or that are free for others."""
    lines = [line.split() for line in (await client.get("/metrics")).text.splitlines() if line.startswith("moe_jax_engine_")]
    found = {name.removeprefix("moe_jax_engine_"): int(float(value)) for name, value in lines}
    held = {name: found[name] for name in ("running", "waiting", "owned_pages")}
    return held | {"free or cached pages": found["free_pages"] + found["cached_pages"]}


def resident_megabytes(pid):
    """Returns the memory of a process on this machine; 0 without one."""
    return psutil.Process(pid).memory_info().rss / 1e6 if pid else 0.0


def main(settings: Settings) -> None:
    """Runs the tasks, or the many requests."""
    if settings.model is None:
        settings = replace(settings, model=httpx.get(f"{settings.url}/v1/models").json()["data"][0]["id"])
    wrong = asyncio.run(soak(settings)) if settings.requests else run_tasks(settings)
    sys.exit(f"failed: {', '.join(wrong)}" if wrong else None)


if __name__ == "__main__":
    main(tyro.cli(Settings))
