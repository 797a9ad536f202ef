"""Administration over HTTP needs a key of its own, and reaches the engine."""

import pytest

from tests.helpers import served

KEY = {"Authorization": "Bearer root"}


def load(folder):
    if folder == "missing":
        raise FileNotFoundError("there is no folder missing")
    return f"the model of {folder}"


@pytest.fixture
def server():
    with served.serve(load=load, api_key="guest", admin_key="root") as running:
        yield running


def test_actions_reach_the_engine(server):
    for path in ("pause", "resume", "reset_prefix_cache"):
        assert server.post(f"/{path}", headers=KEY).json() == {"status": "ok", "weights_version": 0}
    assert server.post("/update_weights", json={"weight_dir": "new"}, headers=KEY).status_code == 200
    assert server.engine.calls == ["pause", "resume", "drop_prefixes", "update the model of new"]


def test_wrong_folders_change_nothing(server):
    for body, message in (({}, "weight_dir must be a folder"), ({"weight_dir": "missing"}, "there is no folder missing")):
        answer = server.post("/update_weights", json=body, headers=KEY)
        assert answer.status_code == 400 and message in answer.json()["error"]["message"]
    assert not server.engine.calls


def test_each_key_opens_its_own_paths(server):
    for headers in ({}, {"Authorization": "Bearer guest"}):
        assert server.post("/pause", headers=headers).status_code == 401
    assert server.post("/v1/completions", json={"prompt": "a"}, headers=KEY).status_code == 401
    assert not server.engine.calls


def test_without_a_key_there_is_no_administration():
    with served.serve() as running:
        assert running.post("/pause").status_code == 404


def test_adapters_come_and_go(server):
    """A request for an adapter names it in `model`, on each endpoint."""
    assert load_adapter(server, lora_name="french", lora_path="runs/french").json() == {"status": "ok", "weights_version": 0}
    guest = {"Authorization": "Bearer guest"}
    models = server.get("/v1/models", headers=guest).json()["data"]
    assert [(each["id"], each.get("parent"), each.get("root")) for each in models] == [
        ("tiny", None, None),
        ("french", "tiny", "runs/french"),
    ]
    assert server.get("/v1/models/french", headers=guest).json()["parent"] == "tiny"
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", chat),
        ("/v1/messages", chat | {"max_tokens": 4}),
        ("/v1/responses", {"input": "a"}),
    ):
        for name, adapter in (("french", "french"), ("tiny", None)):
            answer = server.post(path, json=body | {"model": name}, headers=guest)
            assert answer.status_code == 200 and answer.json()["model"] == name, (path, answer.text)
            assert server.engine.submitted[-1].adapter == adapter, path
    assert server.post("/v1/unload_lora_adapter", json={"lora_name": "french"}, headers=KEY).status_code == 200
    answer = server.post("/v1/completions", json={"prompt": "a", "model": "french"}, headers=guest)
    assert answer.status_code == 404
    assert answer.json()["error"] == {
        "message": "there is no model 'french'; this server has 'tiny'",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


def test_an_adapter_is_replaced_only_on_demand(server):
    load_adapter(server, lora_name="french", lora_path="old")
    again = dict(lora_name="french", lora_path="new")
    answer = load_adapter(server, **again)
    assert answer.status_code == 400 and "load_inplace: true replaces it" in answer.json()["error"]["message"]
    assert load_adapter(server, **again, load_inplace=True).status_code == 200
    assert [(each.name, each.source) for each in server.engine.adapters] == [("french", "new")]


@pytest.mark.parametrize(
    "body, status, param, message",
    [
        ({"lora_path": "a"}, 400, "lora_name", "lora_name must be the name of an adapter"),
        ({"lora_name": "french"}, 400, "lora_path", "lora_path must be a folder on the server, or a hub id"),
        ({"lora_name": "tiny", "lora_path": "a"}, 400, "lora_name", "there is already a model 'tiny': choose another name"),
        ({"lora_name": "french", "lora_path": "missing"}, 400, "lora_path", "there is no folder missing"),
        ({"lora_name": "french", "lora_path": "no place"}, 503, None, "running requests use all adapters"),
        ({"lora_name": "french", "lora_path": "a", "rank": 3}, 400, "rank", "unknown fields: rank"),
    ],
)
def test_wrong_adapters_change_nothing(server, body, status, param, message):
    answer = load_adapter(server, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert message in answer.json()["error"]["message"]
    assert not server.engine.adapters


def test_only_adapters_are_unloaded(server):
    for name, status in (("tiny", 400), ("french", 404)):
        answer = server.post("/v1/unload_lora_adapter", json={"lora_name": name}, headers=KEY)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, "lora_name")


def load_adapter(server, **body):
    return server.post("/v1/load_lora_adapter", json=body, headers=KEY)
