"""`moe-jax push`: uploads the exported model or adapter of a run."""

from dataclasses import dataclass
from typing import Annotated

import tyro


@dataclass(frozen=True)
class PushCommand:
    """Upload a run's exported model or adapter to the Hugging Face hub, with its card.

    moe-jax push runs/mine user/name --private

    The token is HF_TOKEN, or that of `hf auth login`. Without a card, one is written first, as by `moe-jax card`.

    Args:
      run_folder: the output folder of a finished run of `moe-jax finetune`, `prefer` or `grpo`.
      repository: the repository's name; it is made if it does not exist.
      private: make the repository private.
    """

    run_folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(name="run")]
    repository: tyro.conf.Positional[str]
    private: bool = False

    def run(self) -> None:
        """Uploads the folder and prints the commit's address."""
        from moe_jax.recipes.run.push import push

        print(push(self.run_folder, self.repository, private=self.private))
