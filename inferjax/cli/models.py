"""`inferjax models`: the catalog, or what one checkpoint is."""

import argparse
import dataclasses
import json
from typing import Any

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

    known = catalog.load_catalog()
    if args.fetch:
        for name in known if args.source is None else [args.source]:
            catalog.fetch(name, cache_folder(), progress=show_progress(quiet=args.json))
    rows = list_catalog()
    if args.source is None:
        print(json.dumps(rows) if args.json else table(rows))
        return EXIT_OK
    entry = next((row for row in rows if row["name"] == args.source), {})
    facts = entry if entry and not entry["cached"] else entry | describe(args.source)
    print(json.dumps(facts) if args.json else listing(facts))
    return EXIT_OK


def describe(source: str) -> dict[str, Any]:
    """Return what a checkpoint is, from its config and its files' sizes; no weight is read."""
    from inferjax.checkpoint.load import config_only
    from inferjax.checkpoint.opened import find_model
    from inferjax.kv.cache import token_bytes
    from inferjax.models.params import num_parameters

    path = find_model(source, cache_folder(), progress=False)
    config = config_only(path)
    files = sorted(path.glob("*.safetensors")) or sorted(path.glob("*.gguf"))
    return {
        "path": str(path),
        "architecture": config.family,
        "num_parameters": num_parameters(config),
        "num_bytes": sum(file.stat().st_size for file in (files if path.is_dir() else [path])),
        "context": config.max_context,
        "num_layers": config.num_layers,
        "model_dim": config.model_dim,
        "vocab_size": config.vocab_size,
        "dtype": config.dtype,
        "cache_bytes_per_token": token_bytes(config, config.dtype),
    }


def listing(facts: dict[str, Any]) -> str:
    """Return facts for people, one a line."""
    shown = {name.replace("num_", "").replace("_", " "): value for name, value in facts.items()}
    width = max(map(len, shown))
    return "\n".join(
        f"{name.ljust(width)}  {f'{value:,}' if type(value) is int else value}"
        for name, value in shown.items()
    )


def list_catalog() -> list[dict[str, Any]]:
    """Return the catalog's entries, and whether each is in the cache folder."""
    from inferjax.checkpoint import catalog

    folder = cache_folder()
    hidden = {"parts", "notice"}
    return [
        {key: value for key, value in dataclasses.asdict(entry).items() if key not in hidden}
        | {"cached": catalog.is_cached(name, folder)}
        for name, entry in catalog.load_catalog().items()
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Return the catalog for people, a heading and one line a model."""
    cells = [("name", "parameters", "size", "context", "licence", "cached")]
    for row in rows:
        cells.append(
            (
                str(row["name"]),
                f"{row['num_parameters']:,}",
                f"{row['num_bytes'] / 1e6:,.0f} MB",
                f"{row['context']:,}",
                str(row["license"]),
                "yes" if row["cached"] else "no",
            )
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in cells)
    return "\n".join(line.rstrip() for line in lines)
