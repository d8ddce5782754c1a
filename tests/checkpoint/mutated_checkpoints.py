"""Kinds of mutated checkpoints: how each is written, and how everything in it is used."""

import dataclasses
import functools
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "checkpoint")]

import mutate  # noqa: E402
from mutated_gguf import (  # noqa: E402
    GGUF_FILES,
    VOCABULARIES,
    change_gguf,
    change_split,
    change_vocabulary,
    read_all,
    write_gguf,
    write_split,
    write_types,
    write_vocabulary,
)

import inferjax as ij  # noqa: E402
from inferjax.checkpoint.gguf import open_gguf  # noqa: E402
from inferjax.checkpoint.orbax import _digest, _fingerprint  # noqa: E402
from inferjax.tokenizer import tokenizer_from_directory, tokenizer_from_gguf  # noqa: E402

TINY = ROOT / "checkpoints" / "tiny"
FORWARD_EVERY = 40
MESSAGES = [{"role": "user", "content": "héllo"}, {"role": "assistant", "content": "a b"}]


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of checkpoint: `write` puts original i into a folder and returns what to open.

    `change` is then called with the generator and the folder, and may change anything in it. What
    `open` returns, `use` makes work.
    """

    num_originals: int
    write: Callable[[Path, int], Path]
    change: Callable[[np.random.Generator, Path], Path | None]
    open: Callable[[Path], Any]
    use: Callable[[Any], object]

    def write_mutated(self, folder: Path, seed: int) -> Path:
        rng = np.random.default_rng(seed)
        path = self.write(folder, int(rng.integers(self.num_originals)))
        return self.change(rng, folder) or path


_forwards = 0
_seen: set[Any] = set()


def run_model(model: ij.Model) -> None:
    """Trace the forward pass of a model if it is a new one, and run it now and then."""
    global _forwards
    if model.tokenizer is not None:
        use_tokenizer(model.tokenizer)
    if model.config in _seen and _forwards % FORWARD_EVERY:
        return
    _seen.add(model.config)
    _forwards += 1
    tokens = jnp.asarray(np.arange(4)[None] % model.config.vocab_size, jnp.int32)
    run = {"vocabulary": ij.forward, "labels": ij.classify, "none": ij.embed}[model.config.head]
    jax.eval_shape(lambda params: run(params, model.config, tokens), model.params)
    if _forwards % FORWARD_EVERY == 1:
        np.asarray(run(model.params, model.config, tokens))


def use_tokenizer(tokenizer: Any) -> None:
    """Call everything that a vocabulary and a template from a file take part in."""
    ids = tokenizer.encode("héllo the  end 123 日本 🎉\n\n<|im_end|>")
    tokenizer.decode(ids)
    tokenizer.decode(range(-1, 700, 3), skip_special_tokens=False)
    np.asarray([*tokenizer.eos_ids, tokenizer.pad_id, tokenizer.bos_id or 0], np.int32)
    if tokenizer.has_chat_template:
        try:
            tokenizer.apply_chat_template(MESSAGES)
        except ij.InferjaxError:
            return


def link(folder: Path, source: Path, *names: str) -> None:
    """Make the files of `source` appear in `folder`, all but those that are to be changed."""
    folder.mkdir(exist_ok=True)
    for file in source.iterdir():
        if file.is_dir():
            shutil.copytree(file, folder / file.name)
        elif file.name in names:
            shutil.copy(file, folder / file.name)
        elif file.suffix != ".npz":
            os.symlink(file, folder / file.name)


def _folders(*patterns: str) -> list[Path]:
    return sorted({path.parent for pattern in patterns for path in TINY.glob(pattern)})


def _one_per_type() -> list[Path]:
    chosen: dict[str, Path] = {}
    for folder in _folders("*/config.json"):
        chosen.setdefault(json.loads((folder / "config.json").read_text())["model_type"], folder)
    return list(chosen.values())


def folder_target(
    sources: Sequence[Path], names: Sequence[str], mutations: Sequence[mutate.Mutation]
) -> Target:
    """Change one of the named files of a folder."""

    def change(rng: np.random.Generator, folder: Path) -> None:
        there = [folder / name for name in names if (folder / name).exists()]
        mutate.change_file(rng, there[rng.integers(len(there))], mutations)

    def write(folder: Path, index: int) -> Path:
        link(folder, sources[index], *names)
        return folder

    return Target(len(sources), write, change, ij.load, run_model)


# --- AWQ and GPTQ ---

QUANTIZED_FOLDERS = sorted((ROOT / "checkpoints" / "tiny_quantized").iterdir())
QUANTIZED_FILES = ("model.safetensors", "config.json")


def write_quantized(folder: Path, index: int) -> Path:
    link(folder, QUANTIZED_FOLDERS[index], *QUANTIZED_FILES)
    return folder


def change_quantized(rng: np.random.Generator, folder: Path) -> None:
    if rng.random() < 0.5:
        mutations = (*mutate.BINARY, *[mutate.mutate_header] * 4)
        mutate.change_file(rng, folder / QUANTIZED_FILES[0], mutations)
        return
    path = folder / QUANTIZED_FILES[1]
    raw = json.loads(path.read_text())
    found = mutate.mutate_json(rng, json.dumps(raw.pop("quantization_config")).encode()).decode()
    path.write_text(json.dumps(raw)[:-1] + f', "quantization_config": {found}}}')


# --- tokenizers ---

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "generation_config.json", "chat_template.jinja"),
)
TEMPLATE = """{%- for m in messages %}{% if m.role == 'user' %}
{{ bos_token }}{{ m['content'] | trim }}
{% else %}{{ m.content.split('a')[0] ~ eos_token }}{% endif %}{%- set ns = namespace(n=1) -%}
{% macro f(x) %}{{ x | tojson }}{% endmacro %}{{ f(m) }}{% endfor %}"""


def write_tokenizer(folder: Path, index: int) -> Path:
    tokenizer = tokenizer_from_gguf(VOCABULARIES[index])
    from inferjax.tokenizer import save_tokenizer

    save_tokenizer(tokenizer, folder)
    names = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None}
    (folder / "special_tokens_map.json").write_text(json.dumps(names))
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "tool_use", "template": TEMPLATE}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def change_tokenizer(rng: np.random.Generator, folder: Path) -> None:
    name = TOKENIZER_FILES[rng.integers(len(TOKENIZER_FILES))]
    mutations = mutate.BINARY if name.endswith("jinja") else mutate.JSON
    mutate.change_file(rng, folder / name, mutations)


# --- Orbax ---


@functools.cache
def saved_models() -> tuple[Path, ...]:
    folder = Path(tempfile.mkdtemp(prefix="saved-"))
    names = ("llama", "llama_embedding")
    return tuple(ij.save(ij.load(TINY / name), folder / name) for name in names)


def write_orbax(folder: Path, index: int) -> Path:
    return Path(shutil.copytree(saved_models()[index], folder / "saved"))


def change_orbax(rng: np.random.Generator, folder: Path) -> None:
    """Damage any file: its content, its place, its kind, or the set of them."""
    saved = folder / "saved"
    files = sorted(file for file in saved.rglob("*") if file.is_file())
    first, second = (files[i] for i in rng.choice(len(files), 2, replace=False))
    match rng.integers(9):
        case 0:
            first.unlink()
        case 1:
            first.rename(folder / "x")
            second.rename(first)
            (folder / "x").rename(second)
        case 2:
            shutil.copy(first, first.with_name("extra"))
        case 3:
            first.unlink()
            os.symlink(["/etc/passwd", first.name, "/dev/zero", "/"][rng.integers(4)], first)
        case 4:
            first.unlink()
            [os.mkfifo, os.mkdir][rng.integers(2)](first)
        case 5 if first.parent != saved:
            outside = folder / "outside"
            shutil.move(first.parent, outside)
            os.symlink(outside, first.parent)
        case _:
            mutate.change_file(rng, first, mutate.JSON if is_json(first) else mutate.BINARY)


def is_json(file: Path) -> bool:
    return file.read_bytes()[:1] == b"{"


def forge_orbax(rng: np.random.Generator, folder: Path) -> None:
    """Damage a folder as `change_orbax` does, or its record, and make the record agree."""
    saved = folder / "saved"
    record_path = saved / "inferjax.json"
    if rng.random() < 0.3:
        record = json.loads(record_path.read_bytes())
        del record["sha256"]
        text = mutate.mutate_json(rng, json.dumps(record).encode())
    else:
        text = record_path.read_bytes()
        change_orbax(rng, folder)
    try:
        record = json.loads(text)
        record.pop("sha256", None)
        if rng.random() < 0.9:
            files = [f for f in saved.rglob("*") if f.is_file() and f.name != "inferjax.json"]
            record["files"] = {f.relative_to(saved).as_posix(): fingerprint(f) for f in files}
        record = {"sha256": _digest(record), **record}
        text = json.dumps(record).encode()
    except (ValueError, TypeError, AttributeError, RecursionError):
        pass
    if record_path.is_dir() and not record_path.is_symlink():
        record_path.rmdir()
    record_path.unlink(missing_ok=True)
    record_path.write_bytes(text)


def fingerprint(file: Path) -> dict[str, Any]:
    if file.resolve() == Path("/dev/zero"):
        return {"num_bytes": 0, "sha256": hashlib.sha256().hexdigest()}
    return _fingerprint(file)


CONFIG_FAMILIES = _one_per_type()
SAFETENSORS_FOLDERS = _folders("*/model.safetensors")
TARGETS: dict[str, Target] = {
    "safetensors": folder_target(
        SAFETENSORS_FOLDERS, ["model.safetensors"], (*mutate.BINARY, mutate.mutate_header)
    ),
    "quantized": Target(
        len(QUANTIZED_FOLDERS), write_quantized, change_quantized, ij.load, run_model
    ),
    "index": folder_target(
        _folders("*/model.safetensors.index.json"), ["model.safetensors.index.json"], mutate.JSON
    ),
    "config": folder_target(
        CONFIG_FAMILIES, ["config.json"], (*[mutate.mutate_json] * 9, *mutate.JSON)
    ),
    "pooling": folder_target(
        _folders("*/modules.json"), ["modules.json", "1_Pooling/config.json"], mutate.JSON
    ),
    "gguf_types": Target(
        1,
        write_types,
        lambda rng, folder: mutate.change_file(rng, folder / "m.gguf", mutate.BINARY),
        open_gguf,
        read_all,
    ),
    "gguf": Target(len(GGUF_FILES), write_gguf, change_gguf, ij.load, run_model),
    "gguf_split": Target(len(GGUF_FILES), write_split, change_split, ij.load, run_model),
    "gguf_vocabulary": Target(
        2,
        write_vocabulary,
        change_vocabulary,
        lambda path: tokenizer_from_gguf(open_gguf(path).metadata),
        use_tokenizer,
    ),
    "tokenizer": Target(
        2,
        write_tokenizer,
        change_tokenizer,
        tokenizer_from_directory,
        use_tokenizer,
    ),
    "orbax": Target(2, write_orbax, change_orbax, ij.load, run_model),
    "forged_orbax": Target(2, write_orbax, forge_orbax, ij.load, run_model),
}
