"""Says what a checkpoint is, and everything that keeps it from being loaded; no weight is read.

Whatever is broken, the rest is still looked at: a key of the config that is not understood is set
aside, noted, and the config read without it.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from inferjax.checkpoint.facts import ModelFacts, model_facts
from inferjax.checkpoint.gguf_blocks import stored_bits
from inferjax.checkpoint.hub import Hub, fetch_small_files
from inferjax.checkpoint.hub_files import HubId, needed_files
from inferjax.checkpoint.matching import check_size, compare_tensors
from inferjax.checkpoint.opened import (
    Checkpoint,
    lone_gguf,
    open_gguf_checkpoint,
    read_config_file,
    read_tokenizer,
)
from inferjax.checkpoint.orbax import is_saved, read_saved_config
from inferjax.checkpoint.quantized_file import unquantized
from inferjax.checkpoint.safetensors import open_safetensors
from inferjax.checkpoint.stored_codes import CodeLayout
from inferjax.checkpoint.tensor_file import TensorEntry, TensorFile
from inferjax.config import ModelConfig
from inferjax.errors import InferjaxError
from inferjax.models.family import Family, read_config
from inferjax.models.quantization_config import read_quantization
from inferjax.models.registry import family_for

_MAX_PROBLEMS = 50


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What is known of a checkpoint; one without `problems` can be loaded.

    `stored` counts tensors by their dtype. `quantization` says in words how layers of integers are
    stored, `packed` what each kind of codes becomes, and `packed_bytes` what all weights that
    `load` keeps packed take: None where there are none, or something is wrong with the tensors.
    `tokenizer` and `chat_template` tell whether there is one. What is beside the point of a
    problem, such as `model` for an unknown family, is None.
    """

    path: str
    format: str
    num_bytes: int
    problems: tuple[str, ...] = ()
    model: ModelFacts | None = None
    stored: Mapping[str, int] = dataclasses.field(default_factory=dict)
    quantization: str | None = None
    packed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    packed_bytes: int | None = None
    tokenizer: bool = False
    chat_template: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Compared:
    """What a config and the tensors say together."""

    config: ModelConfig | None = None
    packed_bytes: int | None = None


@dataclasses.dataclass(slots=True)
class _Problems:
    """What went wrong so far."""

    texts: list[str] = dataclasses.field(default_factory=list)

    def attempt[T](self, step: Callable[[], T]) -> T | None:
        """Return what a step returns, or None and its problem."""
        try:
            return step()
        except InferjaxError as error:
            self.note(error)
            return None

    def note(self, error: InferjaxError) -> None:
        text = f"{error.what}: {error.why}" if error.why else error.what
        self.texts += [text] if text not in self.texts else []


def summarize(path: Path) -> Summary:
    """Look at a folder, a file, or what `save` wrote."""
    problems = _Problems()
    if is_saved(path):
        return _summarize_saved(path, problems)
    gguf = path if path.suffix == ".gguf" else problems.attempt(lambda: lone_gguf(path))
    if gguf is not None:
        return _summarize_gguf(gguf, problems)
    file = problems.attempt(lambda: open_safetensors(path))
    raw = problems.attempt(lambda: read_config_file(path if path.is_dir() else path.parent))
    family, stored, compared = None, None, _Compared()
    if raw is not None:
        family = problems.attempt(
            lambda: family_for(raw.get("model_type"), raw.get("architectures"))
        )
        stored = problems.attempt(lambda: read_quantization(raw))
    if raw is not None and family is not None:
        opened = file
        weights = opened and problems.attempt(lambda: unquantized(opened, raw, family))
        # Without them, tensors have other names and shapes, which is all the same problem.
        compared = _compare(path, weights, family, raw, problems)
        file = weights or file
    facts: Any = _tokenizer(problems, path, None)
    facts["quantization"] = stored and stored.label
    return _summary(path, "safetensors", problems, compared, file, **facts)


def summarize_hub(hub_id: HubId, *, hub: Hub | None = None) -> Summary:
    """Look at a repository of the hub without fetching its weights, whose tensors stay unchecked.

    Raises: CheckpointError as `fetch_small_files`.
    """
    folder, listing = fetch_small_files(hub_id, hub=hub)
    problems = _Problems()
    files = problems.attempt(lambda: needed_files(hub_id, listing.files)) or []
    num_bytes = sum(listing.files[name] or 0 for name in files if _is_weights(Path(name)))
    config, stored = None, None
    if (folder / "config.json").is_file():
        raw = problems.attempt(lambda: read_config_file(folder)) or {}
        stored = problems.attempt(lambda: read_quantization(raw))
        family = problems.attempt(
            lambda: family_for(raw.get("model_type"), raw.get("architectures"))
        )
        config = None if family is None else _peeled(family, raw, problems)[0]
    tokens: Any = _tokenizer(problems, folder, None)
    return Summary(
        path=hub_id.repo,
        format="gguf" if files and files[0].endswith(".gguf") else "safetensors",
        num_bytes=num_bytes,
        problems=tuple(problems.texts),
        model=None if config is None else model_facts(config),
        quantization=stored and stored.label,
        **tokens,
    )


def _summarize_saved(path: Path, problems: _Problems) -> Summary:
    found = problems.attempt(lambda: read_saved_config(path))
    config = None if found is None else found[0]
    compared = _Compared(config=config)
    return _summary(path, "orbax", problems, compared, None, **_tokenizer(problems, path, None))


def _summarize_gguf(path: Path, problems: _Problems) -> Summary:
    checkpoint = problems.attempt(lambda: open_gguf_checkpoint(path))
    if checkpoint is None:
        return _summary(path, "gguf", problems, _Compared(), None)
    file = checkpoint.file
    compared = _compare(path, file, checkpoint.family, checkpoint.raw, problems, checkpoint)
    tokens = _tokenizer(problems, path, file.metadata)
    return _summary(path, "gguf", problems, compared, file, **tokens)


def _compare(
    path: Path,
    file: TensorFile | None,
    family: Family,
    raw: Mapping[str, Any],
    problems: _Problems,
    checkpoint: Checkpoint | None = None,
) -> _Compared:
    """Return the config as far as it is understood, with the tensors' problems noted."""
    config, raw = _peeled(family, raw, problems)
    if config is None or file is None:
        return _Compared(config=config)
    gguf = checkpoint.gguf if checkpoint else None
    checkpoint = Checkpoint(path=path, file=file, family=family, raw=raw, gguf=gguf)
    config = problems.attempt(checkpoint.config) or config
    before = len(problems.texts)
    problems.attempt(lambda: check_size(checkpoint, config))
    if len(problems.texts) == before:
        found = compare_tensors(checkpoint, config)[2].lines()
        problems.texts += [f"tensors {line}" for line in found]
    if len(problems.texts) > before:
        return _Compared(config=config)
    packed = problems.attempt(lambda: _packed_bytes(checkpoint, config))
    return _Compared(config=config, packed_bytes=packed)


def _peeled(
    family: Family, raw: Mapping[str, Any], problems: _Problems
) -> tuple[ModelConfig | None, Mapping[str, Any]]:
    """Read a config, setting aside one key after the other that is refused."""
    for _ in range(_MAX_PROBLEMS):
        try:
            return read_config(family, raw), raw
        except InferjaxError as error:
            problems.note(error)
            keys = error.facts.get("keys", [error.facts.get("key")])
            rest = _without(raw, set(map(str, keys)) if isinstance(keys, list) else set())
            if rest == raw:
                return None, raw
            raw = rest
    return None, raw


def _without(raw: Mapping[str, Any], keys: set[str]) -> dict[str, Any]:
    """Leave keys out of a config, and out of the objects in it."""
    return {
        name: {k: v for k, v in value.items() if k not in keys}
        if isinstance(value, dict)
        else value
        for name, value in raw.items()
        if name not in keys
    }


def _tokenizer(
    problems: _Problems, path: Path, metadata: Mapping[str, object] | None
) -> dict[str, bool]:
    found = problems.attempt(lambda: read_tokenizer(path, metadata))
    return {
        "tokenizer": found is not None,
        "chat_template": found is not None and found.has_chat_template,
    }


def _summary(
    path: Path,
    kind: str,
    problems: _Problems,
    compared: _Compared,
    file: TensorFile | None,
    **found: Any,
) -> Summary:
    entries: Mapping[str, TensorEntry] = {} if file is None else file.entries
    if file is not None:
        file.close()
    return Summary(
        path=str(path),
        format=kind,
        num_bytes=_size(path, file),
        problems=tuple(problems.texts),
        model=None if compared.config is None else model_facts(compared.config),
        stored=dict(Counter(entry.dtype for entry in entries.values()).most_common()),
        packed={e.dtype: _packed(e.dtype, e.codes) for e in entries.values() if e.codes},
        packed_bytes=compared.packed_bytes,
        **found,
    )


def _packed(dtype: str, layout: CodeLayout) -> str:
    """Say what codes become, and what that costs."""
    bits = stored_bits(dtype)
    file = "" if bits is None else f", {bits:.4g} in the file"
    return f"{layout} ({layout.bits_per_weight:.4g} bits a weight{file})"


def _packed_bytes(checkpoint: Checkpoint, config: ModelConfig) -> int | None:
    """Return the bytes of the weights that stay packed; None if none does."""
    if not any(entry.codes for entry in checkpoint.file.entries.values()):
        return None
    leaves, _, _ = compare_tensors(checkpoint, config, "native")
    return sum(leaf.num_bytes for leaf in leaves if leaf.packing is not None) or None


def _size(path: Path, file: TensorFile | None) -> int:
    """Return the bytes of the files that hold weights."""
    if file is not None:
        paths = list(file.paths)
    elif path.is_dir():
        paths = [each for each in path.rglob("*") if _is_weights(each) or is_saved(path)]
    else:
        paths = [path]
    return sum(each.stat().st_size for each in paths if each.is_file())


def _is_weights(path: Path) -> bool:
    return path.suffix in (".safetensors", ".gguf")
