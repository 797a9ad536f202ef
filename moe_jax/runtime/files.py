"""Writes files that are complete or absent."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_text(path: Path, text: str) -> None:
    """Writes a text atomically: a reader of `path` sees the old text or the whole new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def save_png(figure: "Figure", path: str | Path) -> None:
    """Writes `figure` atomically: a reader of `path` sees the old picture or the whole new one."""
    # Imported here: it is slow, and only drawing needs it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        FigureCanvasAgg(figure).print_png(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
