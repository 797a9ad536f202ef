"""`moe-jax demo`: trains, resumes, exports and samples a small model."""

from dataclasses import dataclass

from moe_jax.commands.options import LoraOption
from moe_jax.demo.run import DemoSettings, run_demo
from moe_jax.runtime.processes import imitate_devices


@dataclass(frozen=True)
class DemoCommand(DemoSettings):  # noqa: D101 (the settings' own)
    __doc__ = DemoSettings.__doc__
    lora: LoraOption = None

    def run(self) -> None:
        """Runs the demo. On a CPU its mesh consists of imitated devices."""
        if self.mesh.size > 1:
            imitate_devices(self.mesh.size)
        run_demo(self)
