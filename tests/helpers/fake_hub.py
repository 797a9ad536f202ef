"""The part of the Hugging Face hub that an upload talks to, as a server on this machine."""

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator

import huggingface_hub.constants
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from moe_jax.serving.http.server import bind
from tests.helpers.served import comes_true

TOKEN = "hf_test"


class FakeHub:
    """Keeps repositories, with the files of their last commit, and the path of each request."""

    def __init__(self):
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.asked: list[str] = []
        self.objects: dict[str, bytes] = {}
        self.url = ""

    def app(self) -> Starlette:
        of_model = "/api/models/{user}/{name}"
        posts = {
            "/api/repos/create": self.create,
            "/api/validate-yaml": self.validate,
            f"{of_model}/preupload/main": self.preupload,
            "/{user}/{name}.git/info/lfs/objects/batch": self.batch,
            f"{of_model}/commit/main": self.commit,
        }
        routes = [Route(path, self.checked(answer), methods=["POST"]) for path, answer in posts.items()]
        return Starlette(routes=[*routes, Route("/objects/{oid}", self.store, methods=["PUT"])])

    def checked(self, answer):
        async def answer_checked(request: Request) -> JSONResponse:
            self.asked.append(request.url.path)
            if request.headers.get("authorization") != f"Bearer {TOKEN}" and answer != self.validate:
                return JSONResponse({"error": "Invalid username or password."}, 401)
            return JSONResponse(await answer(request))

        return answer_checked

    async def create(self, request: Request) -> dict:
        body = await request.json()
        name = f"{body['organization']}/{body['name']}" if body.get("organization") else f"me/{body['name']}"
        self.files.setdefault(name, {})
        self.private[name] = body.get("private") or body.get("visibility") == "private"
        return {"url": f"{self.url}/{name}"}

    async def validate(self, request: Request) -> dict:
        assert (await request.json())["content"].startswith("---\n")
        return {"errors": [], "warnings": []}

    async def preupload(self, request: Request) -> dict:
        files = (await request.json())["files"]
        modes = {file["path"]: "lfs" if file["path"].endswith(".safetensors") else "regular" for file in files}
        return {"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]}

    async def batch(self, request: Request) -> dict:
        objects = (await request.json())["objects"]
        actions = [{**each, "actions": {"upload": {"href": f"{self.url}/objects/{each['oid']}"}}} for each in objects]
        return {"transfer": "basic", "objects": actions}

    async def store(self, request: Request) -> JSONResponse:
        data = await request.body()
        assert hashlib.sha256(data).hexdigest() == request.path_params["oid"]
        self.objects[request.path_params["oid"]] = data
        return JSONResponse({})

    async def commit(self, request: Request) -> dict:
        name = "{user}/{name}".format(**request.path_params)
        for line in (await request.body()).splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                self.files[name][value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                self.files[name][value["path"]] = self.objects[value["oid"]]
        return {"commitUrl": f"{self.url}/{name}/commit/1", "commitOid": "1", "success": True}


@contextlib.contextmanager
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Runs a hub that huggingface_hub talks to until the block ends."""
    made, bound = FakeHub(), bind("127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(made.app(), log_config=None))
    thread = threading.Thread(target=server.run, args=([bound],))
    thread.start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", made.url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    try:
        assert comes_true(lambda: server.started)
        yield made
    finally:
        server.should_exit = True
        thread.join(30)
