"""`moe-jax card`: writes the model card of a run."""

from dataclasses import dataclass
from typing import Annotated

import tyro


@dataclass(frozen=True)
class CardCommand:
    """Write README.md for the Hugging Face hub next to a run's exported model or adapter.

    moe-jax card runs/mine --license apache-2.0

    It names the base, the data, the settings and the results, and shows how to load the weights. Read it before you publish it.

    Args:
      run_folder: the output folder of a finished run of `moe-jax finetune`, `prefer` or `grpo`.
      repository: its future name on the hub, such as user/name.
      license: the license's name on the hub. Default: the base's, if its card is in its folder or in the hub's cache.
      force: replace a card that exists.
    """

    run_folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(name="run")]
    repository: str | None = None
    license: str | None = None
    force: bool = False

    def run(self) -> None:
        """Writes the card and prints its path."""
        from moe_jax.recipes.run.card import write_card

        path = write_card(self.run_folder, repository=self.repository, license=self.license, force=self.force)
        print(f"wrote {path}")
