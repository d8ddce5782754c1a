"""`inferjax plan`: what fits, how fast it can be at best, and at what cost; nothing is loaded."""

import argparse
import json
from pathlib import Path
from typing import Any

from inferjax.cli.options import add_quantize_argument
from inferjax.cli.setup import EXIT_OK, check_target
from inferjax.errors import InvalidInput

LOCAL = ("local", "this-machine")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="config.json, folder, .gguf file, hub id, or a name of the catalog or of the "
        "planner's table; without it, list chips and models",
    )
    _add_hardware(parser)
    _add_weights(parser)
    _add_load(parser)
    _add_money(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw throughput against latency into a PNG file"
    )


def _add_hardware(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("chips")
    group.add_argument(
        "--chip",
        default="h100",
        metavar="NAME",
        help="a chip of the table (default h100), or `local`: this machine, measured now",
    )
    group.add_argument("--chips", type=int, default=1, metavar="N", help="how many (default 1)")
    for axis, text in (("tp", "share every weight"), ("dp", "hold all weights"), ("ep", "experts")):
        group.add_argument(
            f"--{axis}",
            type=int,
            metavar="N",
            help=f"chips along the axis that {text}; without axes the best mesh is looked for"
            if axis != "ep"
            else "chips along the axis that experts are divided over",
        )


def _add_weights(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("weights and cache")
    group.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="dtype of weights that are arrays (default: the checkpoint's; float32 for `--chip "
        "local` on a CPU)",
    )
    add_quantize_argument(group)
    group.add_argument(
        "--kv",
        metavar="DTYPE",
        help="dtype of keys and values: bfloat16, int8, fp8, ... (default: that of activations, "
        "float32 with packed embeddings)",
    )


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument(
        "--batch", type=int, default=1, metavar="B", help="users that decode at a time (default 1)"
    )
    group.add_argument(
        "--tpot-ms",
        type=float,
        metavar="MS",
        help="instead of --batch: find the batch and mesh with the most tokens/s within this time "
        "per token",
    )
    group.add_argument(
        "--context", type=int, default=4096, metavar="S", help="tokens of each (default 4096)"
    )
    group.add_argument(
        "--prompt", type=int, metavar="S", help="tokens of a prompt (default: the context)"
    )
    group.add_argument(
        "--chunk", type=int, default=2048, metavar="T", help="prompt tokens of a step (2048)"
    )
    group.add_argument(
        "--requests-per-s", type=float, default=0.0, metavar="R", help="for the queue (default 0)"
    )
    group.add_argument(
        "--network-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="a message to the user and back (default 0)",
    )
    group.add_argument(
        "--shared-prefix", type=int, default=0, metavar="S", help="tokens all prompts begin with"
    )
    group.add_argument(
        "--draft-accept", type=float, metavar="P", help="how likely a drafted token stands"
    )
    group.add_argument(
        "--draft-len", type=int, default=4, metavar="N", help="drafted tokens a step (default 4)"
    )
    group.add_argument(
        "--draft-share",
        type=float,
        default=0.0,
        metavar="X",
        help="time of drafting a token as a share of a step (default 0: looked up)",
    )
    group.add_argument(
        "--page-size", type=int, default=64, metavar="S", help="tokens of a page (default 64)"
    )
    group.add_argument(
        "--reserve",
        type=float,
        default=0.1,
        metavar="X",
        help="share of memory that is kept back (default 0.1)",
    )


def _add_money(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("cost")
    group.add_argument(
        "--price-per-chip-hour", type=float, metavar="$", help="for the price of a million tokens"
    )
    group.add_argument(
        "--watts", type=float, metavar="W", help="power of a chip (default: its design power)"
    )


def run(args: argparse.Namespace) -> int:
    """Make the plan and print it."""
    from inferjax.cli import plan_report
    from inferjax.planner import make_plan

    if args.model is None:
        print(plan_report.known())
        return EXIT_OK
    _check_plot(args.plot)
    found, model, chip = model_and_chip(args)
    plan = make_plan(
        model,
        chip,
        args.chips,
        load_from(args),
        mesh=_mesh_from(args),
        max_step_s=None if args.tpot_ms is None else args.tpot_ms / 1e3,
        price_per_chip_hour=args.price_per_chip_hour,
        watts=args.watts,
        drafts=_drafts_from(args),
    )
    if args.plot is not None:
        _draw(args, model, plan)
    if args.json:
        print(json.dumps(plan_report.values(found, model, plan)))
    else:
        print(plan_report.report(found, model, plan))
    return EXIT_OK


def model_and_chip(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Return what was found of the model, the planner's view of it, and the chip.

    Raises: UnknownChip, UnsupportedModel, UnsupportedConfig, CheckpointError.
    """
    from inferjax.checkpoint.planning import quantize_mode
    from inferjax.cli.plan_model import as_loaded, find_facts
    from inferjax.planner import chip_named

    quantize_mode(args.dtype, args.quantize)
    is_local = args.chip.lower() in LOCAL
    if is_local and args.chips != 1:
        raise InvalidInput(
            f"--chip {args.chip} --chips {args.chips}",
            why="this machine is measured as one chip; links between several are not measured",
            fix="leave --chips out, or name a chip of the table",
        )
    chip = None if is_local else chip_named(args.chip)
    found = find_facts(args.model)
    dtype = args.dtype or (_local_dtype(found.config.dtype) if is_local else found.config.dtype)
    quantize = args.quantize or ("none" if args.dtype else "native")
    model = as_loaded(found, dtype=dtype, quantize=quantize, kv_dtype=args.kv)
    return found, model, chip or _measured(model, args)


def load_from(args: argparse.Namespace) -> Any:
    """Return what the flags ask of the chips.

    Raises: InvalidInput.
    """
    from inferjax.planner import Load

    return Load(
        batch=args.batch,
        context=args.context,
        prompt=args.prompt,
        arrivals_s=args.requests_per_s,
        network_s=args.network_ms / 1e3,
        shared_prefix=args.shared_prefix,
        chunk=args.chunk,
        page_size=args.page_size,
        reserved_share=args.reserve,
    )


def _mesh_from(args: argparse.Namespace) -> Any:
    """Return the mesh of the flags; an axis that is left out is 1, all of them mean none."""
    from inferjax.planner import Mesh

    axes = {"tp": args.tp, "dp": args.dp, "ep": args.ep}
    given = {name: size for name, size in axes.items() if size is not None}
    return Mesh(**given) if given else None


def _drafts_from(args: argparse.Namespace) -> Any:
    from inferjax.planner import Drafts

    if args.draft_accept is None:
        return None
    return Drafts(accept=args.draft_accept, draft_len=args.draft_len, share=args.draft_share)


def _local_dtype(dtype: str) -> str:
    """Return the dtype that `load` gives arrays here."""
    import jax

    return "float32" if jax.default_backend() == "cpu" else dtype


def _measured(model: Any, args: argparse.Namespace) -> Any:
    """Measure this machine at the batches that the plan is about."""
    from inferjax.bench.machine import measure_chip
    from inferjax.cli.setup import keep_compiled_programs

    keep_compiled_programs()
    return measure_chip(model, rows=tuple(sorted({1, max(1, args.batch)})), watts=args.watts)


def _check_plot(path: Path | None) -> None:
    """Refuse a plot that could not be written, before anything is computed.

    Raises: InvalidInput, MissingPackage.
    """
    if path is None:
        return
    from inferjax.bench.plot import check_matplotlib

    check_matplotlib()
    check_target(path)


def _draw(args: argparse.Namespace, model: Any, plan: Any) -> None:
    """Draw the plan's mesh beside the other meshes that hold the load."""
    from inferjax.cli.plan_plot import draw
    from inferjax.planner.mesh import meshes
    from inferjax.planner.search import tradeoff

    others = [mesh for mesh in meshes(model.config, args.chips) if mesh != plan.mesh]
    curves = [(str(plan.mesh), plan.curve)]
    curves += [(str(mesh), tradeoff(model, plan.chip, mesh, plan.load)) for mesh in others]
    title = f"{args.model} on {args.chips} x {plan.chip.name}, {plan.load.context:,} tokens each"
    draw([(name, curve) for name, curve in curves if curve], args.plot, title=title)
