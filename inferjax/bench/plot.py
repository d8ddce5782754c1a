"""Pictures of measurements, which need matplotlib; and that of a sweep."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from inferjax.bench.sweep import load_name
from inferjax.errors import MissingPackage


def check_matplotlib() -> None:
    """Refuse to go on without matplotlib.

    Raises: MissingPackage.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingPackage(
            "matplotlib is not installed",
            why="the plot needs it, and nothing else does",
            fix="pip install 'inferjax[plots]'",
        ) from error


@contextmanager
def chart(path: Path, *, title: str) -> Iterator[Any]:
    """Yield the axes of a picture, which is then written into a PNG file.

    Raises: MissingPackage.
    """
    check_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    yield axes
    axes.set_title(title, fontsize="small", wrap=True)
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png", dpi=150)


def draw(result: dict[str, Any], path: Path, *, title: str) -> None:
    """Draw throughput against time per token, with the limit, into a PNG file.

    Raises: MissingPackage.
    """
    with chart(path, title=title) as axes:
        limits = result["limits"]
        axes.plot(
            [point["tpot_ms"] for point in limits],
            [point["output_tok_s"] for point in limits],
            color="tab:gray",
            linestyle="--",
            marker=".",
            label="limit of memory and matrix speed",
        )
        for point in limits:
            place = (point["tpot_ms"], point["output_tok_s"])
            axes.annotate(str(point["batch"]), place, color="tab:gray", fontsize="x-small")
        _draw_levels(axes, [level for level in result["levels"] if "tpot" in level["latency_ms"]])
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("time per output token, ms (median; bars to p99)")
        axes.set_ylabel("output tokens/s, all requests together")


def _draw_levels(axes: Any, levels: list[dict[str, Any]]) -> None:
    medians = [level["latency_ms"]["tpot"]["p50"] for level in levels]
    tails = [level["latency_ms"]["tpot"]["p99"] for level in levels]
    rates = [level["output_tok_s"] for level in levels]
    reach = [[0.0] * len(levels), [b - a for a, b in zip(medians, tails, strict=True)]]
    axes.errorbar(medians, rates, xerr=reach, marker="o", capsize=3, label="measured")
    for level, median, rate in zip(levels, medians, rates, strict=True):
        name = f"{load_name(level['load'])} ({level['roofline']['reached_share']:.0%})"
        axes.annotate(
            name, (median, rate), xytext=(4, -10), textcoords="offset points", fontsize="x-small"
        )
