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
