"""A warm engine for a benchmark: compiled, limits measured, both kept out of the figures."""

import argparse
import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from inferjax.cli.options import engine_config
from inferjax.cli.session import exec_from, load_model
from inferjax.cli.setup import show_progress


@dataclasses.dataclass(frozen=True, kw_only=True)
class Warm:
    """What a load is put on. `compiling` says how long the warm-up took."""

    model: Any
    engine: Any
    roofline: Any
    compiling: dict[str, Any]
    settings: dict[str, Any]

    @property
    def compiled(self) -> str:
        """One line for people."""
        return (
            f"{self.compiling['programs']} programs compiled in {self.compiling['seconds']:.1f} s "
            "before the measurement"
        )


@contextmanager
def warm_engine(args: argparse.Namespace, **defaults: object) -> Iterator[Warm]:
    """Load the model, start an engine with the flags' settings, and compile everything.

    `defaults` are settings of the engine that this benchmark chooses itself.
    """
    from inferjax.bench.roofline import Roofline, measure_machine
    from inferjax.bench.throughput import warm_up
    from inferjax.engine import Engine

    config, exec = engine_config(args, **defaults), exec_from(args)
    model = load_model(args, quiet=args.json)
    machine = measure_machine(str(model.params.embed.dtype))
    engine = Engine(model, config, exec=exec)
    try:
        begin = time.perf_counter()
        warm_up(engine, progress=show_progress(quiet=args.json))
        seconds, stats = time.perf_counter() - begin, engine.stats()
        yield Warm(
            model=model,
            engine=engine,
            roofline=Roofline(model.params, model.config, machine, exec),
            compiling={
                "programs": stats.compilations,
                "seconds": seconds,
                "compile_s": stats.compile_s,
            },
            settings={"engine": dataclasses.asdict(config), "exec": dataclasses.asdict(exec)},
        )
    finally:
        engine.close()
