"""OpenAI's own client gets completions, chats, streams and their accounts from the server."""

import json

import httpx
import pytest

import moe_jax
from moe_jax.kernels.attention.paged import PAGE_SIZE
from moe_jax.serving.chat import ChatRequest, prepare
from moe_jax.serving.conversation import model_defaults
from moe_jax.serving.http.answers import chat_logprobs, completion_logprobs, token_bytes
from moe_jax.serving.http.body import NEUTRAL
from moe_jax.serving.http.record import ENGINE_HELP
from moe_jax.serving.loop import Stats
from moe_jax.serving.request import EngineLimits
from tests.helpers import served, tiny
from tests.helpers.fake_engine import FakeEngine


@pytest.fixture(scope="module")
def server():
    with served.serve() as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return server.openai()


def test_a_completion_is_the_text_behind_the_prompt(client):
    found = client.completions.create(model="tiny", prompt="hello", max_tokens=50)
    assert found.choices[0].text == "hello" and found.choices[0].finish_reason == "stop"
    assert found.object == "text_completion" and found.model == "tiny" and found.id.startswith("cmpl-")
    usage = found.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 6, 11)
    assert usage.prompt_tokens_details.cached_tokens == 1


def test_sixteen_tokens_are_the_default_of_completions(client):
    found = client.completions.create(model="tiny", prompt="a" * 40)
    assert found.choices[0].text == "a" * 16 and found.choices[0].finish_reason == "length"


def test_prompts_may_be_several_and_token_ids(client):
    ids = served.tokenizer()("xyz")["input_ids"]
    found = client.completions.create(model="tiny", prompt=["ab", "cd"], n=2, echo=True)
    assert [choice.text for choice in found.choices] == ["abab", "abab", "cdcd", "cdcd"]
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert found.usage.prompt_tokens == 4 and found.usage.prompt_tokens_details.cached_tokens == 2
    assert client.completions.create(model="tiny", prompt=ids).choices[0].text == "xyz"
    several = client.completions.create(model="tiny", prompt=[ids, ids[:1]], echo=True)
    assert [choice.text for choice in several.choices] == ["xyzxyz", "xx"]


def test_a_stream_has_the_same_text_and_usage(client):
    options = dict(model="tiny", prompt=["héllo", "🙂"], n=2, max_tokens=7)
    whole = client.completions.create(**options)
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    texts = {choice.index: "" for choice in whole.choices}
    ends = {}
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
        ends[chunk.choices[0].index] = chunk.choices[0].finish_reason
    assert [texts[choice.index] for choice in whole.choices] == [choice.text for choice in whole.choices]
    assert [ends[choice.index] for choice in whole.choices] == [choice.finish_reason for choice in whole.choices]
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1
    without = list(client.completions.create(**options, stream=True, stream_options={"include_usage": None}))
    assert all(chunk.usage is None and chunk.choices for chunk in without)


def test_a_chat_goes_through_the_template(server, client):
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    found = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=7)
    asked = server.engine.handles[-1].prompt
    assert served.tokenizer().decode(asked) == (
        "<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    answer = found.choices[0]
    assert (answer.message.role, answer.message.content, answer.finish_reason) == ("assistant", "system", "length")
    assert server.engine.submitted[-1].stop_token_ids == (0, 2)
    # Without a limit, an answer may be as long as the engine has room.
    assert client.chat.completions.create(model="tiny", messages=messages).choices[0].finish_reason == "stop"
    assert server.engine.submitted[-1].max_new_tokens == 512 - len(asked)


def test_a_chats_answer_ends_where_the_room_does(server, client):
    """Clients send the same max_tokens with each message, while the conversation grows."""
    options = dict(model="tiny", messages=[{"role": "user", "content": "hi"}])
    for name in ("max_tokens", "max_completion_tokens"):
        assert client.chat.completions.create(**options, **{name: 4096}).choices[0].finish_reason == "stop"
        assert server.engine.submitted[-1].max_new_tokens == 512 - len(server.engine.handles[-1].prompt)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_fields_that_ask_for_what_happens_anyway_are_accepted(server, path):
    body = {"prompt": "a"} if path == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    neutral = NEUTRAL | {"stream_options": {"continuous_usage_stats": False}, "reasoning_effort": None, "length_penalty": 1}
    answer = server.post(f"/v1/{path}", json=body | neutral)
    assert answer.status_code == 200, answer.text
    others = {"spaces_between_special_tokens": False, "detokenize": 1, "priority": False, "suffix": "x"}
    for name, value in others.items():
        error = server.post(f"/v1/{path}", json=body | {name: value}).json()["error"]
        assert error["param"] == name and error["message"].startswith(f"{name} can only be ")


def test_tools_and_template_values_reach_the_template(monkeypatch):
    template = "{{ tools[0]['function']['name'] if tools else 'none' }} {{ mood }} {{ messages[0]['tool_calls'] }}"
    tokenizer = served.tiny.tokenizer(template)
    monkeypatch.setattr(served, "tokenizer", lambda: tokenizer)
    tools = [{"type": "function", "function": {"name": "clock"}}]
    options = dict(
        model="tiny",
        messages=[{"role": "user", "content": "x"}],
        tools=tools,
        extra_body={"chat_template_kwargs": {"mood": "calm"}},
    )
    with served.serve() as running:
        client = running.openai()
        client.chat.completions.create(**options)
        client.chat.completions.create(**options, tool_choice="none")
        prompts = [tokenizer.decode(handle.prompt) for handle in running.engine.handles]
    assert prompts == ["clock calm ", "none calm "]


def test_developers_and_empty_answers_reach_the_template():
    tokenizer = served.tiny.tokenizer(
        "{% for m in messages if m.role != 'developer' %}{{ m.role }}:{{ m.content }};{% endfor %}"
    )
    messages = [
        {"role": "developer", "content": "Answer in French."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "refusal": None},
        {"role": "user", "content": "hello?"},
    ]
    tokens = prepare(tokenizer, ChatRequest(messages), None).tokens
    assert tokenizer.decode(tokens) == "system:Answer in French.;user:hi;assistant:;user:hello?;"


def test_a_chats_stream_begins_with_its_role(client):
    messages = [{"role": "user", "content": "hi"}]
    chunks = list(client.chat.completions.create(model="tiny", messages=messages, max_tokens=4, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant" and not any(delta.role for delta in deltas[1:])
    assert "".join(delta.content or "" for delta in deltas) == "use"
    assert chunks[-1].choices[0].finish_reason == "length" and chunks[0].object == "chat.completion.chunk"


def test_stop_texts_end_one_choice_alone(client):
    found = client.completions.create(model="tiny", prompt=["abcdef", "xbcyef"], stop=["de", "zz"], max_tokens=20)
    assert [(choice.text, choice.finish_reason) for choice in found.choices] == [("abc", "stop"), ("xbcyef", "stop")]
    assert found.usage.completion_tokens == 5 + 7
    streamed = client.completions.create(model="tiny", prompt="abcdef", stop="de", stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "abc"


def test_a_stop_token_is_no_part_of_the_text(client):
    tokenizer = served.tokenizer()
    extra = {"stop_token_ids": tokenizer("c")["input_ids"]}
    found = client.completions.create(model="tiny", prompt="abcd", extra_body=extra).choices[0]
    assert (found.text, found.finish_reason) == ("ab", "stop")
    # Without ends, the prompt comes again after the end token, which has no text.
    found = client.completions.create(model="tiny", prompt="ab", max_tokens=6, extra_body={"ignore_eos": True}).choices[0]
    assert (found.text, found.finish_reason) == ("abab", "length")


@pytest.mark.parametrize("stream", [False, True])
def test_what_ends_a_text_may_be_part_of_it(client, stream):
    def text(**options):
        found = client.completions.create(model="tiny", prompt="abcdef", max_tokens=20, stream=stream, **options)
        return "".join(chunk.choices[0].text for chunk in found) if stream else found.choices[0].text

    included = {"include_stop_str_in_output": True}
    assert text(stop=["de", "zz"], extra_body=included) == "abcde"
    assert text(extra_body=included | {"stop_token_ids": served.tokenizer()("c")["input_ids"]}) == "abc"
    assert text(extra_body=included) == "abcdef"
    assert text(extra_body=included | {"skip_special_tokens": False}) == "abcdef<|end|>"


def test_stop_texts_count_after_the_least_length(client):
    options = dict(model="tiny", prompt="abcdef", stop=["b", "e"], extra_body={"min_tokens": 3})
    assert client.completions.create(**options).choices[0].text == "abcd"


def test_a_prompts_beginning_may_be_cut_off(server, client):
    extra = {"truncate_prompt_tokens": 2}
    found = client.completions.create(model="tiny", prompt=["abc", "d"], echo=True, extra_body=extra)
    assert [choice.text for choice in found.choices] == ["bcbc", "dd"]
    client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], extra_body=extra)
    assert served.tokenizer().decode(server.engine.handles[-1].prompt) == "t\n"


def test_several_names_and_web_pages():
    with served.serve(other_names=("small",), allowed_origins=("https://page.example",)) as running:
        assert [each.id for each in running.openai().models.list()] == ["tiny", "small"]
        assert running.openai().models.retrieve("small").id == "small"
        for name in ("tiny", "small"):
            assert running.openai().completions.create(model=name, prompt="a").model == name
        page = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
        allowed = httpx.options(running.url + "/v1/completions", headers=page | {"Access-Control-Request-Headers": "x"})
        assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == "https://page.example"
        refused = httpx.options(running.url + "/v1/completions", headers=page | {"Origin": "https://other.example"})
        assert "access-control-allow-origin" not in refused.headers
    # Without the option no page may read answers.
    with served.serve() as running:
        assert running.get("/v1/models", headers=page).headers.keys().isdisjoint({"access-control-allow-origin"})


def test_options_reach_the_engine(server, client):
    client.completions.create(
        model="tiny", prompt="a", temperature=0.5, top_p=0.75, seed=-1, presence_penalty=0.25, frequency_penalty=-1,
        logit_bias={"7": -100}, user="me",
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.5}
        | {"min_tokens": 2, "bad_words": ["no"], "allowed_token_ids": [1, 7]},
    )  # fmt: skip
    options = server.engine.submitted[-1]
    assert (options.min_tokens, options.bad_words, options.allowed_token_ids) == (2, ("no",), (1, 7))
    assert (options.temperature, options.top_p, options.seed) == (0.5, 0.75, 2**32 - 1)
    assert (options.presence_penalty, options.frequency_penalty, options.logit_bias) == (0.25, -1, {7: -100})
    assert (options.top_k, options.min_p, options.repetition_penalty, options.n) == (5, 0.1, 1.5, 1)
    client.completions.create(model="tiny", prompt="a", n=3, seed=4)
    assert (server.engine.submitted[-1].seed, server.engine.submitted[-1].n) == (4, 3)


def test_a_models_own_options_are_the_defaults(tmp_path):
    own = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.05}
    (tmp_path / "generation_config.json").write_text(json.dumps(own))
    defaults = model_defaults(tmp_path, tiny.dense().config, served.tokenizer(), draws=True)
    assert defaults.sampling == own and defaults.ends_of_answers == (0, 2)
    with served.serve(defaults=defaults) as running:
        running.post("/v1/completions", json={"prompt": "a"})
        running.post(
            "/v1/completions", json={"prompt": "a", "top_k": -1, "min_p": 0, "repetition_penalty": 1, "temperature": 0}
        )
    found = [tuple(getattr(options, name) for name in own) for options in running.engine.submitted]
    assert found == [tuple(own.values()), (0, None, 0.8, 0, 1)]


def test_wrong_options_of_a_model_are_named_before_it_is_served(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "top_p": 7, "repetition_penalty": 0}')
    message = r"generation_config.json: top_p must be None or a number in \(0, 1\]; got 7; repetition_penalty must be"
    with pytest.raises(ValueError, match=message):
        model_defaults(tmp_path, tiny.dense().config, served.tokenizer())


def test_log_probabilities_of_a_completion(client):
    tokens = served.tokenizer()("ab")["input_ids"]
    options = dict(model="tiny", prompt="ab", max_tokens=2, logprobs=1)
    found = client.completions.create(**options).choices[0].logprobs
    assert found.tokens == ["a", "b"] and found.text_offset == [0, 1]
    assert found.token_logprobs == [-0.25 * token for token in tokens]
    assert found.top_logprobs[0] == {"a": -0.25 * tokens[0], "#": -9.0}
    streamed = [chunk.choices[0].logprobs for chunk in client.completions.create(**options, stream=True)]
    assert [name for each in streamed if each for name in each.tokens] == ["a", "b"]
    assert [place for each in streamed if each for place in each.text_offset] == [0, 1]
    assert client.completions.create(**options | {"logprobs": 0}).choices[0].logprobs.top_logprobs == [None, None]


def test_an_echo_has_the_prompts_log_probabilities(client):
    """lm-eval reads sums of token_logprobs, and whether each is the largest of top_logprobs."""
    a, b, c = served.tokenizer()("abc")["input_ids"]
    options = dict(model="tiny", prompt=["abc", "ab"], echo=True, logprobs=1)
    first, second = client.completions.create(**options, max_tokens=1).choices
    assert (first.text, second.text) == ("abca", "aba")
    assert first.logprobs.tokens == ["a", "b", "c", "a"] and first.logprobs.text_offset == [0, 1, 2, 3]
    assert first.logprobs.token_logprobs == [None, *(-0.25 * token for token in (b, c, a))]
    assert first.logprobs.top_logprobs[:2] == [None, {"b": -0.25 * b, "#": -9.0}]
    assert second.logprobs.tokens == ["a", "b", "a"]
    plain = client.completions.create(**options | {"logprobs": 0}).choices[0].logprobs
    assert plain.top_logprobs[:3] == [None] * 3 and plain.token_logprobs[0] is None


def test_no_tokens_only_score_the_prompt(client):
    options = dict(model="tiny", prompt="abc", max_tokens=0, logprobs=0)
    found = client.completions.create(**options, echo=True, n=2)
    assert [(one.text, one.finish_reason, one.logprobs.tokens) for one in found.choices] == [("abc", "length", [*"abc"])] * 2
    assert found.usage.completion_tokens == 0
    bare = client.completions.create(**options).choices[0]
    assert (bare.text, bare.finish_reason, bare.logprobs) == ("", "length", None)


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_those_of_the_engine(server, client, stream):
    """Libraries of reinforcement learning learn from the ids, which a text tokenized again may not have."""
    extra = {"return_token_ids": True}
    text = dict(model="tiny", prompt="héy", stop="y", extra_body=extra)
    chat = dict(model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=3, extra_body=extra)
    wanted = served.tokenizer()("héy")["input_ids"]
    if stream:
        chunks = [*client.completions.create(**text, stream=True)]
        assert chunks[0].choices[0].prompt_token_ids == wanted
        assert not any("prompt_token_ids" in chunk.choices[0].model_extra for chunk in chunks[1:])
        assert [token for chunk in chunks for token in chunk.choices[0].token_ids] == wanted
        chunks = [*client.chat.completions.create(**chat, stream=True)]
        assert chunks[0].prompt_token_ids == (prompt := server.engine.handles[-1].prompt)
        assert [token for chunk in chunks for token in chunk.choices[0].token_ids] == prompt[:3]
    else:
        choice = client.completions.create(**text).choices[0]
        assert (choice.prompt_token_ids, choice.token_ids) == (wanted, wanted)
        found = client.chat.completions.create(**chat)
        assert found.prompt_token_ids == (prompt := server.engine.handles[-1].prompt)
        assert found.choices[0].token_ids == prompt[:3]


def test_log_probabilities_of_prompts_are_by_token_id(client):
    (a, b), extra = served.tokenizer()("ab")["input_ids"], {"prompt_logprobs": 1}
    wanted = {str(b): {"logprob": -0.25 * b, "decoded_token": "b"}, "5": {"logprob": -9.0, "decoded_token": "#"}}
    choice = client.completions.create(model="tiny", prompt=[a, b], extra_body=extra).choices[0]
    assert choice.prompt_logprobs == [None, wanted] and choice.logprobs is None
    chat = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], extra_body=extra)
    # The template's second token is the u of user.
    assert chat.prompt_logprobs[0] is None
    assert chat.prompt_logprobs[1][str(served.tokenizer()("u")["input_ids"][0])]["decoded_token"] == "u"


def test_top_logprobs_have_the_likeliest_of_equal_texts():
    """Parts of characters have one text. The drawn token comes in addition to the likeliest ones, as in OpenAI's API."""
    tokenizer = tiny.tokenizer()
    first, second = tokenizer("é")["input_ids"]
    (other,) = tokenizer("x")["input_ids"]
    drawn = [(other, -4.0, {first: -0.1, second: -3.0}), (second, -3.0, {first: -0.1})]
    expected = [{"\N{REPLACEMENT CHARACTER}": -0.1, "x": -4.0}, {"\N{REPLACEMENT CHARACTER}": -0.1}]
    assert completion_logprobs(tokenizer, drawn, 0)["top_logprobs"] == expected


def test_log_probabilities_of_a_chat(client):
    messages = [{"role": "user", "content": "x"}]
    options = dict(model="tiny", messages=messages, max_tokens=3, logprobs=True)
    content = client.chat.completions.create(**options, top_logprobs=2).choices[0].logprobs.content
    assert [each.token for each in content] == ["<|im_start|>", "u", "s"] and content[1].bytes == list(b"u")
    assert [each.token for each in content[1].top_logprobs] == ["u", "#"]
    content = client.chat.completions.create(**options).choices[0].logprobs.content
    assert content[0].top_logprobs == [] and content[0].logprob == -0.25


def test_each_token_is_decoded_once_for_log_probabilities():
    tokenizer, decoded = tiny.tokenizer(), []
    tokenizer.decode = lambda ids: decoded.append(ids) or "x"
    tokens = [(40, -1.0, {40: -1.0, 41: -2.0})] * 9
    assert len(chat_logprobs(tokenizer, tokens)["content"]) == len(completion_logprobs(tokenizer, tokens, 0)["tokens"]) == 9
    assert decoded == [[40], [41]]


def test_bytes_of_parts_of_characters():
    tokenizer = served.tokenizer()
    ids = tokenizer("é ")["input_ids"]
    assert [token_bytes(tokenizer, token) for token in ids] == [[0xC3], [0xA9], [0x20]]


def test_models_health_and_tokens(server, client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == 512
    assert server.get("/health").json() == server.get("/ping").json() == {"status": "ok"}
    assert server.get("/version").json() == {"version": moe_jax.__version__}
    tokens = server.post("/tokenize", json={"prompt": "héy"}).json()
    assert tokens == {"tokens": served.tokenizer()("héy")["input_ids"], "count": 4, "max_model_len": 512}
    assert server.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "héy"}
    of_chat = server.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()
    assert of_chat["tokens"][0] == 1 and of_chat["count"] > 10


def test_the_longest_request_is_what_pages_hold():
    limits = EngineLimits(max_sequences=1, max_tokens_per_step=1, max_length=512, num_pages=3)
    with served.serve(FakeEngine(limits)) as running:
        longest = running.get("/v1/models/tiny").json()["max_model_len"]
        assert longest == running.post("/tokenize", json={"prompt": "x"}).json()["max_model_len"] == 2 * PAGE_SIZE + 1
        for length, status in ((longest - 1, 200), (longest, 400)):
            assert running.post("/v1/completions", json={"prompt": "x" * length, "max_tokens": 1}).status_code == status


def test_metrics_count_requests_and_tokens():
    with served.serve() as running:
        running.openai().completions.create(model="tiny", prompt="hello", max_tokens=3)
        running.get("/no/such/path")
        text = running.get("/metrics").text
    assert 'moe_jax_requests_total{path="/v1/completions",status="200"} 1.0' in text
    assert 'moe_jax_requests_total{path="other",status="404"} 1.0' in text
    assert "moe_jax_prompt_tokens_total 5.0" in text and "moe_jax_new_tokens_total 3.0" in text
    assert "moe_jax_first_text_seconds_count 1.0" in text and "moe_jax_engine_tokens_total 3.0" in text
    assert "moe_jax_engine_running 0.0" in text
    assert "# HELP moe_jax_engine_running Sequences that have a slot on a device." in text
    helps = [line.split(" ", 3)[3] for line in text.splitlines() if line.startswith("# HELP")]
    assert ENGINE_HELP.keys() == set(Stats._fields) and all(each.endswith(".") and " " in each for each in helps)


def test_metrics_of_each_replica():
    """In families of their own: sums over the engine's would count twice."""
    engine = FakeEngine()
    numbers = engine.stats()._replace(running=2, num_tokens=7)
    engine.stats_of_devices = lambda: {"cuda:0": numbers, "cuda:1": numbers._replace(running=1)}
    with served.serve(engine) as running:
        text = running.get("/metrics").text
    assert 'moe_jax_replica_running{replica="cuda:0"} 2.0' in text
    assert 'moe_jax_replica_running{replica="cuda:1"} 1.0' in text
    assert 'moe_jax_replica_tokens_total{replica="cuda:1"} 7.0' in text
    assert "moe_jax_engine_running 0.0" in text and "moe_jax_engine_running{" not in text


def test_each_request_has_one_line_in_the_log(caplog):
    caplog.set_level("INFO", "moe_jax.serving")
    with served.serve(FakeEngine()) as running:
        running.openai().completions.create(model="tiny", prompt="hello", max_tokens=3)
        refused = running.post("/v1/completions%0Aforged", json={})
        running.get("/health")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 5 and lines[0].startswith("serving tiny on http://127.0.0.1:")
    assert "POST /v1/completions 200, 5 prompt tokens (1 cached), 3 new, first after 0.0" in lines[1]
    assert lines[2].startswith(f"{refused.headers['x-request-id']} 127.0.0.1 POST /v1/completions%0Aforged 404")
    assert json.loads(refused.text)["error"]["message"]
