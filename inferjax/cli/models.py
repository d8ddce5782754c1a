"""`inferjax models`: the catalog, or what one checkpoint is."""

import argparse
import dataclasses
import json

from inferjax.cli.setup import EXIT_OK, cache_folder, show_progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument(
        "source", nargs="?", metavar="NAME_OR_PATH", help="describe this model instead of listing"
    )
    parser.add_argument(
        "--fetch", action="store_true", help="fetch the named catalog model, or all of them"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """List the catalog or describe one model."""
    from inferjax.checkpoint import catalog

    if args.fetch:
        for name in [args.source] if args.source else catalog.load_catalog():
            catalog.fetch(name, cache_folder(), progress=show_progress(quiet=args.json))
    rows = list_catalog()
    if args.source in {row["name"] for row in rows}:
        rows = [row for row in rows if row["name"] == args.source]
    print(json.dumps(rows) if args.json else table(rows))
    return EXIT_OK


def list_catalog() -> list[dict[str, object]]:
    """Return the catalog's entries, and whether each is in the cache folder."""
    from inferjax.checkpoint import catalog

    folder = cache_folder()
    hidden = {"parts", "notice"}
    return [
        {key: value for key, value in dataclasses.asdict(entry).items() if key not in hidden}
        | {"cached": catalog.is_cached(name, folder)}
        for name, entry in catalog.load_catalog().items()
    ]


def table(rows: list[dict[str, object]]) -> str:
    """Return the catalog for people, a heading and one line a model."""
    cells = [("name", "parameters", "size", "context", "licence", "cached")]
    for row in rows:
        cells.append(
            (
                str(row["name"]),
                f"{row['num_parameters']:,}",
                f"{int(str(row['num_bytes'])) / 1e6:,.0f} MB",
                f"{row['context']:,}",
                str(row["license"]),
                "yes" if row["cached"] else "no",
            )
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in cells)
    return "\n".join(line.rstrip() for line in lines)
