"""Matches a checkpoint's tensors with its config, before any of them is read."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np

from inferjax.checkpoint.opened import Checkpoint
from inferjax.checkpoint.packing import Packing
from inferjax.checkpoint.planning import Mode, Planner
from inferjax.checkpoint.quantized_file import is_idle_bias
from inferjax.checkpoint.tensor_file import quoted
from inferjax.config import ModelConfig
from inferjax.errors import CheckpointError
from inferjax.models.family import model_sources, skips_tensor
from inferjax.models.gguf_format import Stored
from inferjax.models.params import ArraySpec, num_parameters, param_spec
from inferjax.models.quantized import abstract_leaf
from inferjax.models.sources import Source

_MAX_LISTED = 8
_HEAD, _EMBED = "lm_head.weight", "model.embed_tokens.weight"


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One weight to be: what to read, how to build it, and what it becomes.

    `packing` says how it is packed, None that it becomes an array. `dtype` is the array's.
    """

    reads: tuple[Stored, ...]
    build: Callable[..., Any]
    shape: tuple[int, ...]
    dtype: str
    packing: Packing | None = None

    @property
    def num_bytes(self) -> int:
        """The size of the weight in its final form."""
        if self.packing is not None:
            return self.packing.num_bytes
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def abstract(self) -> Any:
        """The weight as shapes, before it is read."""
        if self.packing is not None:
            return abstract_leaf(self.packing.spec, self.packing.form)
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


@dataclasses.dataclass(slots=True)
class Problems:
    """Every tensor that is wrong, so that one error can tell all of it.

    Two lists say more than the names: the shapes, or the dtypes.
    """

    missing: list[str] = dataclasses.field(default_factory=list)
    misshapen: list[str] = dataclasses.field(default_factory=list)
    unexpected: list[str] = dataclasses.field(default_factory=list)
    unreadable: list[str] = dataclasses.field(default_factory=list)

    def lines(self) -> list[str]:
        """Say what is wrong, one line for each kind of problem."""
        found: Mapping[str, list[str]] = {
            "missing": [quoted(name) for name in self.missing],
            "of another shape": self.misshapen,
            "unexpected": [quoted(name) for name in self.unexpected],
            "of a dtype that is not read as a weight": self.unreadable,
        }
        return [f"{len(items)} {kind}: {_listed(items)}" for kind, items in found.items() if items]


def match_tensors(
    checkpoint: Checkpoint, config: ModelConfig, mode: Mode = "none"
) -> tuple[list[Leaf], Any]:
    """Return the weights to read and the tree that they form.

    Raises: CheckpointError with all missing, misshapen, unexpected and unreadable tensors.
    """
    check_size(checkpoint, config)
    leaves, treedef, problems = compare_tensors(checkpoint, config, mode)
    _report(checkpoint, problems)
    _check_tied(checkpoint, config)
    return leaves, treedef


def compare_tensors(
    checkpoint: Checkpoint, config: ModelConfig, mode: Mode = "none"
) -> tuple[list[Leaf], Any, Problems]:
    """Return what `match_tensors` does and what is wrong with it; no weight is read."""
    specs, treedef = jax.tree.flatten_with_path(
        param_spec(config), is_leaf=lambda node: isinstance(node, ArraySpec)
    )
    sources = treedef.flatten_up_to(model_sources(checkpoint.family, config))
    problems, used = Problems(), set[str]()
    stored = checkpoint.file.entries
    planner = Planner(stored, config, mode)
    leaves = []
    for (path, spec), source in zip(specs, sources, strict=True):
        reads = _check_source(checkpoint, config, source, problems)
        used.update(part.name for read in reads for part in read.parts)
        packing = planner.packing(path, spec, reads, source.build)
        dtype = spec.dtype or config.dtype
        leaves.append(Leaf(reads, source.build, spec.shape, dtype, packing))
    problems.unexpected += [
        name for name in stored if name not in used and not _is_known(checkpoint, name, config)
    ]
    problems.unreadable += [
        f"{quoted(name)} is {stored[name].dtype}"
        for name in used
        if name in stored and not stored[name].readable
    ]
    return leaves, treedef, problems


def check_size(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Refuse a config far larger than the file before the config's size costs time and memory.

    Raises: CheckpointError.
    """
    entries = checkpoint.file.entries
    stored = sum(math.prod(entry.shape) for entry in entries.values())
    wanted = "many more"
    if config.num_layers <= len(entries):
        wanted = num_parameters(config)
        if wanted <= 4 * stored:
            return
    raise CheckpointError(
        f"{checkpoint.path} holds {stored} weights in {len(entries)} tensors",
        why=f"its config calls for {wanted} weights in {config.num_layers} layers",
        fix="the config belongs to another model, or most of the files are missing",
    )


def _check_source(
    checkpoint: Checkpoint, config: ModelConfig, source: Source, problems: Problems
) -> tuple[Stored, ...]:
    """Return where a weight's tensors are; note those that are missing or of another shape."""
    entries = checkpoint.file.entries
    reads = tuple(checkpoint.find(tensor, config) for tensor in source.tensors)
    # Several weights may be parts of one tensor, which is told once.
    for name, shape in {part.name: part.whole for read in reads for part in read.parts}.items():
        if name not in entries:
            problems.missing.append(name)
        elif not _fits(checkpoint, entries[name].shape, shape):
            text = f"{quoted(name)} is {entries[name].shape}, expected {shape}"
            problems.misshapen += [] if text in problems.misshapen else [text]
    return reads


def _fits(checkpoint: Checkpoint, stored: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Compare shapes; GGUF's converters have dropped axes of length one, or kept them."""
    if checkpoint.gguf is None:
        return stored == wanted
    return [n for n in stored if n != 1] == [n for n in wanted if n != 1]


def _is_known(checkpoint: Checkpoint, name: str, config: ModelConfig) -> bool:
    """Tell whether a tensor that no weight is made of is known to be superfluous."""
    if checkpoint.gguf is not None:
        return name in checkpoint.gguf.ignored_tensors
    prefix = checkpoint.family.base_prefix
    full = name if name.startswith((prefix, "lm_head.", "score.")) else prefix + name
    superfluous = skips_tensor(checkpoint.family, full, config)
    return (full == _HEAD and config.tied) or superfluous or is_idle_bias(checkpoint.file, name)


def _check_tied(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Accept a head beside tied embeddings only as their copy: which of two to use is unclear."""
    if checkpoint.gguf or not config.tied or _HEAD not in checkpoint.file.entries:
        return
    embed = cast(Source, model_sources(checkpoint.family, config).embed)
    [part] = checkpoint.find(embed.tensors[0], config).parts
    name = part.name
    file = checkpoint.file
    same = file.entries[_HEAD].shape == embed.tensors[0].shape and all(
        np.array_equal(ours, theirs)
        for ours, theirs in zip(file.pieces(_HEAD), file.pieces(name), strict=True)
    )
    if not same:
        raise CheckpointError(
            f"{checkpoint.path}: {_HEAD} differs from {name}",
            why="config.json says tie_word_embeddings is true, which makes them one tensor",
            fix="set tie_word_embeddings to false to use the head, or remove the head",
        )


def _report(checkpoint: Checkpoint, problems: Problems) -> None:
    lines = problems.lines()
    if not lines:
        return
    raise CheckpointError(
        f"{checkpoint.path} does not hold the weights that its config calls for",
        why="; ".join(lines),
        fix="check that config.json and the weights are of one model, and that all files are there",
        **dataclasses.asdict(problems),
    )


def _listed(items: list[str]) -> str:
    more = f" and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
    return ", ".join(items[:_MAX_LISTED]) + more
