"""`moe-jax launch`: starts a program once for each GPU."""

from dataclasses import dataclass

from moe_jax.runtime.launch import LaunchSettings, launch


@dataclass(frozen=True)
class LaunchCommand(LaunchSettings):  # noqa: D101 (the settings' own)
    __doc__ = LaunchSettings.__doc__

    def run(self) -> None:
        """Runs the job, and exits with its status unless that is 0."""
        if status := launch(self):
            raise SystemExit(status)
