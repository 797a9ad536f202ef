"""`moe-jax watch`: a page in the browser that follows a run."""

import contextlib
from dataclasses import dataclass
from typing import Annotated

import tyro


@dataclass(frozen=True)
class WatchCommand:
    """Follow a training run in the browser: its loss, learning rate, tokens a second, samples, time left, and experts' load.

    moe-jax watch runs/mine

    The page follows a run in progress, and shows a finished one. It reads the run's files, and nothing leaves this machine.

    Args:
      run_folder: the output folder of `moe-jax finetune`, `prefer` or `grpo`.
      host: the address to listen on. Default: only this machine can open the page. 0.0.0.0: all can, without a key.
      port: the port to listen on; 0 chooses a free one.
    """

    run_folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(name="run")]
    host: str = "127.0.0.1"
    port: int = 8090

    def run(self) -> None:
        """Serves the page until Ctrl-C."""
        from moe_jax.pages.run_server import RunServer

        with RunServer(self.run_folder, self.host, self.port) as server:
            print(f"{server.url} follows {server.folder}; Ctrl-C ends", flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                server.serve_forever()
