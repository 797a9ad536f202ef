"""`moe-jax demo`: trains, resumes, exports and samples a small model."""

from dataclasses import dataclass

from moe_jax.demo.run import DemoSettings, run_demo


@dataclass(frozen=True)
class DemoCommand(DemoSettings):  # noqa: D101 (the settings' own)
    __doc__ = DemoSettings.__doc__

    def run(self) -> None:
        """Runs the demo."""
        run_demo(self)
