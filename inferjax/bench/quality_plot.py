"""The picture of a quality table: divergence against the size of the weights."""

from pathlib import Path
from typing import Any

from inferjax.bench.plot import check_matplotlib


def draw(result: dict[str, Any], path: Path, *, title: str) -> None:
    """Draw the mean divergence of every quantized variant against its bytes into a PNG file.

    Raises: MissingPackage.
    """
    check_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rows = [row for row in result["rows"] if row["recipe"]]
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        mine = sorted(
            (row for row in rows if row["recipe"] == recipe),
            key=lambda row: row["bytes_per_weight"],
        )
        sizes = [row["bytes_per_weight"] for row in mine]
        axes.plot(sizes, [row["kl_mean"] for row in mine], marker="o", label=recipe)
        for row in mine:
            place = (row["bytes_per_weight"], row["kl_mean"])
            axes.annotate(
                row["scheme"],
                place,
                xytext=(5, 4),
                textcoords="offset points",
                fontsize="x-small",
            )
    axes.set_yscale("log")
    axes.set_xlabel("bytes a weight, scales included")
    axes.set_ylabel("mean KL divergence to the float32 model, nats a token")
    axes.set_title(title, fontsize="small", wrap=True)
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png", dpi=150)
