"""What `generate` and `chat` share: a loaded model, its settings, and replies with their speed."""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from inferjax.cli.options import SAMPLING_HELP, add_fields, add_quantize_argument, from_fields
from inferjax.cli.reply import Reply, collect
from inferjax.cli.setup import (
    cache_folder,
    keep_compiled_programs,
    show_progress,
    warnings_in_a_line,
)
from inferjax.config import KV_DTYPES
from inferjax.errors import TokenizerError

DEFAULT_MODEL = "smollm2-135m-instruct"


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which weights to load."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="NAME_OR_PATH",
        help=f"catalog name, checkpoint folder or .gguf file (default {DEFAULT_MODEL})",
    )
    group.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="dtype of the weights that are arrays",
    )
    add_quantize_argument(group)


def add_exec_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say how to run."""
    group = parser.add_argument_group("execution")
    group.add_argument(
        "--exact", action="store_true", help="bit-identical results whatever shares the batch"
    )
    group.add_argument(
        "--kv",
        choices=[*KV_DTYPES, "fp8"],
        help="how keys and values are stored (default: as the weights); fp8 is float8_e4m3fn",
    )


def load_model(args: argparse.Namespace, *, quiet: bool = False) -> Any:
    """Load the model that the flags name, from the cache folder if it is in the catalog."""
    from inferjax.checkpoint.load import load

    with warnings_in_a_line():
        return load(
            args.model,
            dtype=args.dtype,
            quantize=args.quantize,
            progress=show_progress(quiet=quiet),
            cache_dir=cache_folder(),
        )


def exec_from(args: argparse.Namespace) -> Any:
    """Return the `Exec` that the flags ask for."""
    import inferjax as ij

    return ij.Exec(exact=args.exact, kv_dtype=args.kv)


def add_arguments(parser: argparse.ArgumentParser, defaults: Mapping[str, object]) -> None:
    """Add the model, execution and sampling flags; `defaults` are the command's sampling values."""
    import inferjax as ij

    add_model_arguments(parser)
    add_exec_arguments(parser)
    add_fields(parser, ij.SamplingParams, title="sampling", texts=SAMPLING_HELP, defaults=defaults)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session:
    """A loaded model and how to run it; `compile_seconds` is the time jax compiled in between."""

    model: Any
    sampling: Any
    exec: Any
    compile_seconds: Callable[[float, float], float]

    @property
    def weight_bytes(self) -> int:
        """What one decoded token reads."""
        from inferjax.bench.costs import weight_bytes_per_step

        return weight_bytes_per_step(self.model.params, self.model.config, batch=1)

    def reply(self, prompt_ids: list[int], emit: Callable[[str], object]) -> Reply:
        """Generate one reply, giving its text to `emit` piece by piece."""
        from inferjax.generation import stream

        sampling, tokenizer = self.sampling, self.model.tokenizer
        return collect(
            stream(self.model, prompt_ids, sampling, exec=self.exec),
            tokenizer.detokenizer(skip_special_tokens=sampling.skip_special_tokens),
            num_prompt_tokens=len(prompt_ids),
            stops=sampling.stop,
            include_stop=sampling.include_stop,
            min_tokens=sampling.min_tokens,
            emit=emit,
            compile_seconds=self.compile_seconds,
        )


@contextmanager
def open_session(
    args: argparse.Namespace, defaults: Mapping[str, object], *, quiet: bool = False
) -> Iterator[Session]:
    """Check the flags, then load the model."""
    import inferjax as ij
    from inferjax.cli.timing import CompileClock

    sampling = from_fields(args, ij.SamplingParams, defaults=defaults)
    keep_compiled_programs()
    clock = CompileClock()
    try:
        model = load_model(args, quiet=quiet)
        if model.tokenizer is None:
            raise TokenizerError(
                f"{args.model} has no tokenizer",
                why="text cannot become tokens without a vocabulary",
                fix="put the model's tokenizer.json beside its config.json",
            )
        yield Session(
            model=model,
            sampling=sampling,
            exec=exec_from(args),
            compile_seconds=clock.seconds,
        )
    finally:
        clock.close()


def speed(reply: Reply, weight_bytes: int) -> dict[str, float | None]:
    """Return the limit that reading the weights once a token sets here, and the share reached."""
    from inferjax.bench.limits import measure_bandwidth_gbps

    bandwidth = measure_bandwidth_gbps()
    limit = bandwidth * 1e9 / weight_bytes
    reached = reply.timings.decode_tok_s
    return {
        "weight_bytes_per_token": weight_bytes,
        "bandwidth_gbps": bandwidth,
        "limit_tok_s": limit,
        "limit_share": None if reached is None else reached / limit,
    }


def print_speed(reply: Reply, facts: Mapping[str, float | None]) -> None:
    """Print the speed of a reply on stderr, in two lines."""
    timings = reply.timings
    if timings.first_token_s is None:
        return
    lines = [
        f"prompt: {timings.num_prompt_tokens} tokens, {_rate(timings.prefill_tok_s)}; first token "
        f"after {timings.first_token_s:.2f} s; compiling took {timings.compile_s:.2f} s",
        f"answer: {timings.num_tokens} tokens, {_rate(timings.decode_tok_s)}{_share(facts)}",
    ]
    print("\n".join(lines), file=sys.stderr)


def _rate(tok_s: float | None) -> str:
    return "too short to time" if tok_s is None else f"{tok_s:.1f} tokens/s"


def _share(facts: Mapping[str, float | None]) -> str:
    share, limit, bandwidth = facts["limit_share"], facts["limit_tok_s"], facts["bandwidth_gbps"]
    if share is None:
        return ""
    return (
        f", {share:.0%} of the {limit:.0f} tokens/s at which {bandwidth:.1f} GB/s of memory "
        "delivers the weights"
    )
