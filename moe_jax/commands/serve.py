"""`moe-jax serve`: answers requests over HTTP, with OpenAI's API."""

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from moe_jax.commands.loading import LoadingOptions, checked_loading
from moe_jax.commands.options import LimitOptions, engine_mesh, search_rarely

if TYPE_CHECKING:
    from moe_jax.models.decoder import Decoder
    from moe_jax.serving.http.service import ServerSettings

KEY_VARIABLE, ADMIN_VARIABLE = "MOE_JAX_API_KEY", "MOE_JAX_ADMIN_KEY"


@dataclass(frozen=True)
class ServeCommand:
    """Answer requests over HTTP, with OpenAI's API, many at once.

    moe-jax serve Qwen/Qwen3-30B-A3B --port 8000

    MOE_JAX_API_KEY=secret moe-jax serve runs/demo/model --host 0.0.0.0

    moe-jax serve Qwen/Qwen3-30B-A3B --replicas 8

    moe-jax serve Qwen/Qwen3-235B-A22B --devices 8

    Then: curl http://127.0.0.1:8000/v1/chat/completions -H "Content-Type: application/json"
    -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}]}'

    Args:
      model: a Hugging Face folder or hub id. Or the output folder of a run: its model, or its adapter, which names the weights.
      host: the address to listen on. Default: only this machine can reach the server. 0.0.0.0: all can.
      port: the port to listen on; 0 chooses a free one.
      page: serve a page at / to chat with the model in a browser, with the engine's load. It asks for the key, if there is one.
      name: the model's name in the API, or several; answers have the first, unless a request has another. Default: the hub
        id, or the folder's name.
      api_key: a key that requests must carry. Better set MOE_JAX_API_KEY: other users can see a command's options.
      hosts: names of this server beyond localhost and --host, such as a proxy's. On a local address without a key, requests
        with another name in Host get 403. "*": all names.
      sizes: sizes of the engine.
      allowed_origins: web pages' origins that may read answers (CORS), such as https://example.org. "*": all.
      max_waiting: number of texts that wait for their turn; requests beyond get status 429.
      max_body_mb: largest size of a request, in megabytes.
      request_seconds: time after which a request is given up.
      shutdown_seconds: time that running requests have to finish after SIGTERM or Ctrl-C; a second signal ends them at once.
      lazy: compile a program when a request first needs it, while all others wait, instead of all programs at the start.
      drafts: draft tokens, for fewer steps. lookup:3 drafts up to three tokens from the text itself, for any model. Without a
        value, or with module, the model's multi-token prediction module drafts one. The text is the same up to rounding.
      devices: number of GPUs of each replica. They split the experts, and each computes texts of its own.
      adapters: adapters (LoRA) to serve next to the model, as NAME=FOLDER. Requests with "model": NAME use one; any of them
        share a step. They may change only attention; --adapter serves any other one, alone.
      max_adapters: number of adapters that there is room for, also for those loaded later over HTTP. Default: those given.
      max_adapter_rank: largest rank of these adapters. Each costs as much as one of this rank.
      loading: how the model is loaded.
    """

    model: tyro.conf.Positional[str]
    host: str = "127.0.0.1"
    port: int = 8000
    page: bool = False
    name: tuple[str, ...] = ()
    api_key: str | None = None
    hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    sizes: tyro.conf.OmitArgPrefixes[LimitOptions] = LimitOptions()
    max_waiting: int = 1024
    max_body_mb: float = 8
    request_seconds: float = 3600
    shutdown_seconds: float = 30
    lazy: bool = False
    drafts: str | None = None
    devices: Annotated[int, tyro.conf.arg(aliases=["--devices-per-replica"])] = 1
    adapters: tuple[str, ...] = ()
    max_adapters: int | None = None
    max_adapter_rank: int = 32
    loading: tyro.conf.OmitArgPrefixes[LoadingOptions] = LoadingOptions()

    def run(self) -> None:
        """Serves until a signal. Checks all options and files before weights are read."""
        try:
            import prometheus_client  # noqa: F401
            import starlette  # noqa: F401
            import uvicorn  # noqa: F401
        except ImportError as error:
            raise ImportError(f"{error}: moe-jax serve needs `pip install 'moe_jax[serve]'`") from error
        from moe_jax.adapters.source import source_of
        from moe_jax.checkpoint.hf_load import find_checkpoint, read_config
        from moe_jax.checkpoint.tokenizer import load_tokenizer
        from moe_jax.generation.speculative import draft_source
        from moe_jax.serving.adapters import read_stacks
        from moe_jax.serving.conversation import model_defaults
        from moe_jax.serving.engine import Engine, check_config, check_drafting
        from moe_jax.serving.http.server import Server, bind
        from moe_jax.serving.http.service import ServerSettings, Service

        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
        logging.getLogger("moe_jax").setLevel(logging.INFO)
        own_name = Path(self.model).resolve().name if Path(self.model).is_dir() else self.model
        name, *others = self.name or (own_name,)
        settings = ServerSettings(
            name,
            page=self.page,
            other_names=tuple(others),
            allowed_origins=self.allowed_origins,
            admin_key=os.environ.get(ADMIN_VARIABLE),
            api_key=self.api_key if self.api_key is not None else os.environ.get(KEY_VARIABLE),
            hosts=(self.host, *self.hosts),
            max_body_bytes=int(self.max_body_mb * 1e6),
            request_seconds=self.request_seconds,
            shutdown_seconds=self.shutdown_seconds,
        )
        source = source_of(self.model, self.loading.adapter)
        folder = find_checkpoint(source.weights)
        mtp = draft_source(self.drafts or 0).name == "module"
        config, tokenizer = read_config(folder, mtp=mtp), load_tokenizer(source.tokenizer or folder)
        adapters = self._named_adapters(settings)
        limits = replace(
            self.sizes.engine_limits(config, self.max_waiting),
            max_adapters=len(adapters) if self.max_adapters is None else self.max_adapters,
            max_adapter_rank=self.max_adapter_rank,
        )
        check_drafting(self.drafts or 0, config, limits)
        defaults = model_defaults(folder, config, tokenizer, draws=True)
        mesh = engine_mesh(self.devices, config, limits.replicas)
        for_one = {"--drafts": self.drafts, "--adapter": source.adapter is not None, "--max-adapters": limits.max_adapters}
        if mesh is not None and (wrong := [option for option, is_set in for_one.items() if is_set]):
            raise ValueError(f"{' and '.join(wrong)}: use --devices 1; got {self.devices}")
        check_config(config, limits.kv_dtype)
        form, load = checked_loading(folder, source.adapter, self.loading, mtp=mtp, mesh=mesh)
        if limits.max_adapters and (mtp or (source.adapter is not None and form != "whole")):
            raise ValueError("adapters by name need whole weights if the model has an adapter too, and no --drafts module")
        for adapter in adapters.values():
            read_stacks(config, adapter, limits.max_adapter_rank)
        bound = bind(self.host, self.port)
        engine_options: dict[str, Any] = dict(drafts=self.drafts or 0, take_over=True, lazy=self.lazy)
        engine = Engine(load(), limits=limits, tokenizer=tokenizer, **engine_options)
        for name, adapter in adapters.items():
            engine.load_adapter(name, adapter)
        search_rarely()

        def load_again(path: str) -> "Decoder":
            return checked_loading(find_checkpoint(path), source.adapter, self.loading, mtp=mtp, mesh=mesh)[1]()

        Server(Service(engine, defaults, settings, load_again)).run([bound])

    def _named_adapters(self, settings: "ServerSettings") -> dict[str, str]:
        """Returns {name: folder} of --adapters.

        Raises:
          ValueError: one has another form, or a name is taken; or there are more than --max-adapters.
        """
        found: dict[str, str] = {}
        for each in self.adapters:
            name, _, folder = each.partition("=")
            if not name or not folder:
                raise ValueError(f"--adapters must be NAME=FOLDER, as in french=runs/french/adapter; got {each!r}")
            if name in (settings.model_name, *settings.other_names, *found):
                raise ValueError(f"--adapters: there is already a model or an adapter {name!r}; choose another name")
            found[name] = folder
        if self.max_adapters is not None and len(found) > self.max_adapters:
            raise ValueError(f"--max-adapters must be at least {len(found)}, the number of --adapters; got {self.max_adapters}")
        return found
