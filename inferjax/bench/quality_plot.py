"""The picture of a quality table: divergence against the size of the weights."""

from pathlib import Path
from typing import Any

from inferjax.bench.plot import chart


def draw(result: dict[str, Any], path: Path, *, title: str) -> None:
    """Draw the mean divergence of every quantized variant against its bytes into a PNG file.

    Raises: MissingPackage.
    """
    with chart(path, title=title) as axes:
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
