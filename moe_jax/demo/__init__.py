"""`moe-jax demo`: trains, resumes, exports and samples a small model on this machine."""

from typing import TYPE_CHECKING

from moe_jax.runtime.lazy import export_lazily

if TYPE_CHECKING:
    from moe_jax.demo.run import DemoResult, DemoSettings, run_demo

__all__ = ["DemoResult", "DemoSettings", "run_demo"]

export_lazily(__name__)
