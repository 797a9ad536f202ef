"""Reports of an engine's measurements: the lines of a table, and a picture."""

from collections.abc import Sequence
from pathlib import Path

from moe_jax.runtime.files import save_png
from moe_jax.serving.measurements import Measured

HEADER = f"{'clients':>8}{'requests':>10}{'tokens/s':>10}{'TTFT median':>14}{'95 %':>12}{'TPOT median':>14}{'95 %':>12}"


def table_row(measured: Measured) -> str:
    """Returns the line of one load, below `HEADER`."""
    load = measured.load
    times = "".join(
        f"{1e3 * seconds:>{width - 3}.{digits}f} ms"
        for spread, digits in ((measured.first_token, 1), (measured.each_token, 2))
        for seconds, width in zip(spread, (14, 12), strict=True)
    )
    return f"{load.clients:>8}{load.clients * load.requests_each:>10}{measured.tokens_per_second:>10.0f}{times}"


def plot_measured(measured: Sequence[Measured], title: str, path: str | Path) -> None:
    """Draws throughput, TTFT and TPOT over the number of clients into a PNG file."""
    # Only who draws waits for matplotlib.
    from matplotlib.figure import Figure

    clients = [one.load.clients for one in measured]
    figure = Figure(figsize=(12, 4), layout="constrained")
    figure.suptitle(title)
    throughput, first, each = figure.subplots(1, 3)
    throughput.plot(clients, [one.tokens_per_second for one in measured], "o-")
    throughput.set(title="Throughput", ylabel="output tokens/s")
    spreads = [[one.first_token for one in measured], [one.each_token for one in measured]]
    for axes, name, of_loads in zip((first, each), ("Time to first token", "Time per output token"), spreads, strict=True):
        axes.plot(clients, [1e3 * spread.median for spread in of_loads], "o-", label="median")
        axes.plot(clients, [1e3 * spread.high for spread in of_loads], "o--", label="95th percentile")
        axes.set(title=name, ylabel="ms")
        axes.legend()
    for axes in (throughput, first, each):
        axes.set_xscale("log", base=2)
        axes.set_xticks(clients, [str(count) for count in clients])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("clients")
        axes.grid(alpha=0.3)
    save_png(figure, path)
