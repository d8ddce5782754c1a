"""`inferjax models`: the catalog, or what one checkpoint is."""

import argparse
import dataclasses
import json
from typing import Any

from inferjax.cli.setup import EXIT_OK, EXIT_PARTIAL, cache_folder, show_progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument(
        "source",
        nargs="?",
        metavar="MODEL",
        help="describe this path, catalog name or hub id instead of listing",
    )
    parser.add_argument(
        "--fetch", action="store_true", help="fetch the named catalog model, or all of them"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """List the catalog or describe one model; 1 if the model cannot be loaded."""
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
    return EXIT_PARTIAL if facts.get("problems") else EXIT_OK


def describe(source: str) -> dict[str, Any]:
    """Return what a checkpoint is and what keeps it from being loaded; no weight is read."""
    from inferjax.checkpoint.hub_files import parse_hub_id
    from inferjax.checkpoint.opened import find_model, local_path
    from inferjax.checkpoint.summary import summarize, summarize_hub

    hub_id = parse_hub_id(source) if local_path(source) is None else None
    if hub_id is not None:
        summary = summarize_hub(hub_id)
    else:
        summary = summarize(find_model(source, cache_folder(), progress=False))
    found = dataclasses.asdict(summary)
    model = found.pop("model") or {}
    return {**found, **model}


def listing(facts: dict[str, Any]) -> str:
    """Return facts for people, one a line; what is wrong comes last."""
    facts = dict(facts)
    problems, layers = facts.pop("problems", ()), facts.pop("layers", ())
    shown = {name.replace("num_", "").replace("_", " "): value for name, value in facts.items()}
    rows = [(name, _value(value)) for name, value in shown.items() if value not in (None, (), {})]
    rows += [("of which" if i == 0 else "", _layers(kind)) for i, kind in enumerate(layers)]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name.ljust(width)}  {value}" for name, value in rows]
    if problems:
        lines += ["", "cannot be loaded:", *(f"- {text}" for text in problems)]
    return "\n".join(lines)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_value(inner)}" for name, inner in value.items())
    if isinstance(value, list | tuple):
        more = f" and {len(value) - 8} more" if len(value) > 8 else ""
        return ", ".join(map(str, value[:8])) + more
    return f"{value:,}" if isinstance(value, int) else str(value)


def _layers(kind: dict[str, Any]) -> str:
    """Describe layers that are alike in one line."""
    heads = f"{kind['num_heads']} heads on {kind['num_kv_heads']} of {kind['head_dim']}"
    window = f" over {kind['window']:,} tokens" if kind["window"] else ""
    experts = f", {kind['experts_per_token']} of {kind['num_experts']} experts"
    feed = f"feed-forward of {kind['ffn_dim']:,}{experts if kind['num_experts'] else ''}"
    return f"{kind['num_layers']} {kind['attention']}{window}: {heads}, {feed}"


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
