"""The picture of a plan: throughput against time per token."""

from collections.abc import Sequence
from pathlib import Path

from inferjax.planner import Point


def draw(curves: Sequence[tuple[str, Sequence[Point]]], path: Path, *, title: str) -> None:
    """Draw named trade-offs into a PNG file, with the number of users at every point.

    Raises: MissingPackage without matplotlib.
    """
    from inferjax.bench.plot import chart

    with chart(path, title=title) as axes:
        for name, curve in curves:
            times = [point.step.seconds * 1e3 for point in curve]
            axes.plot(times, [point.tok_s for point in curve], marker=".", label=name)
            for point, time in zip(curve, times, strict=True):
                axes.annotate(str(point.batch), (time, point.tok_s), fontsize="x-small")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("time per output token, ms (at least)")
        axes.set_ylabel("output tokens/s, all users together (at most)")
