"""The tokenizer of a checkpoint directory, from the files Hugging Face tools write there."""

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from inferjax.errors import TokenizerError
from inferjax.tokenizer.tokenizer import SpecialTokens, Tokenizer
from inferjax.tokenizer.untrusted import check_core, check_text, encode_ids, is_text

MAX_FILE_BYTES = 256 * 2**20
# Parsed JSON takes up to thirty times its text. Old files list a thousand added tokens: 200 kB.
MAX_CONFIG_BYTES = 8 * 2**20


def tokenizer_from_directory(path: str | Path) -> Tokenizer:
    """Read tokenizer.json and the files beside it.

    Raises: TokenizerError for a missing, oversized or damaged file, naming it.
    """
    directory = Path(path)
    try:
        core = _read_core(directory)
        config = _read_json(directory / "special_tokens_map.json")
        config |= _read_json(directory / "tokenizer_config.json")
        generation = _read_json(directory / "generation_config.json")
        templates = _templates(directory, config)
    except OSError as error:
        raise _damaged(directory, str(error)) from error
    return Tokenizer(core, _special_tokens(core, config, generation), templates)


def _read_core(directory: Path) -> tokenizers.Tokenizer:
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise TokenizerError(
            f"there is no tokenizer.json in {directory}",
            why="a vocabulary is read from that file only (or from a .gguf)",
            fix="save the fast tokenizer beside the weights: tokenizer.save_pretrained(directory)",
        )
    text = _read_text(file, MAX_FILE_BYTES)
    check_text(text)
    try:
        core = tokenizers.Tokenizer.from_str(text)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    # A panic in the library's Rust code derives from BaseException.
    except BaseException as error:
        raise _damaged(file, str(error)) from error
    check_core(core)
    # A file can carry the batching settings of its training run.
    core.no_truncation()
    core.no_padding()
    return core


def _special_tokens(
    core: tokenizers.Tokenizer, config: Mapping[str, Any], generation: Mapping[str, Any]
) -> SpecialTokens:
    bos = _named_id(core, config, "bos_token")
    eos = _eos_ids(_named_id(core, config, "eos_token"), generation, core.get_vocab_size())
    prefix, suffix = _wrapping(core)
    match config.get("add_bos_token"):
        case True if bos is not None and bos not in prefix:
            prefix = (bos, *prefix)
        case False:
            prefix = tuple(i for i in prefix if i != bos)
    match config.get("add_eos_token"):
        case True if eos and eos[0] not in suffix:
            suffix = (*suffix, eos[0])
        case False:
            suffix = tuple(i for i in suffix if i not in eos)
    return SpecialTokens(
        bos=bos,
        eos=eos,
        pad=_named_id(core, config, "pad_token"),
        unk=_named_id(core, config, "unk_token"),
        prefix=prefix,
        suffix=suffix,
    )


def _named_id(core: tokenizers.Tokenizer, config: Mapping[str, Any], key: str) -> int | None:
    """Return the id of a token given as its text or as {"content": text}."""
    token = config.get(key)
    content = token.get("content") if isinstance(token, Mapping) else token
    if content is None:
        return None
    if not isinstance(content, str):
        raise TokenizerError(
            f"{key} in tokenizer_config.json is {str(content)[:80]!r}",
            why="a token is given as text or as an object with the key 'content'",
            fix="save the tokenizer again",
        )
    return core.token_to_id(content) if is_text(content) else None


def _eos_ids(named: int | None, generation: Mapping[str, Any], size: int) -> tuple[int, ...]:
    declared = generation.get("eos_token_id")
    ids = declared if isinstance(declared, list) else [declared]
    for token_id in ids:
        if token_id is not None and not (type(token_id) is int and 0 <= token_id < 2**31):
            raise TokenizerError(
                f"eos_token_id in generation_config.json is {str(declared)[:80]}",
                why=f"ids are whole numbers from 0; the vocabulary has {size} tokens",
                fix="correct generation_config.json",
            )
    return tuple(dict.fromkeys(i for i in [named, *ids] if i is not None))


def _wrapping(core: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that the file's post-processor puts before and after a text."""
    plain = encode_ids(core, "a", add_special_tokens=False)
    whole = encode_ids(core, "a", add_special_tokens=True)
    starts = range(len(whole) - len(plain) + 1)
    start = next((i for i in starts if whole[i : i + len(plain)] == plain), 0)
    return tuple(whole[:start]), tuple(whole[start + len(plain) :])


def _templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Collect chat templates; a file of their own wins over the entry in tokenizer_config.json."""
    templates = _named_templates(config.get("chat_template"))
    templates |= _named_templates(_read_json(directory / "chat_template.json").get("chat_template"))
    file = directory / "chat_template.jinja"
    if file.is_file():
        templates["default"] = _read_text(file, MAX_CONFIG_BYTES)
    return templates


def _named_templates(entry: object) -> dict[str, str]:
    """Accept one template, or a list of {"name": ..., "template": ...}."""
    if entry is None:
        return {}
    named = entry if isinstance(entry, list) else [{"name": "default", "template": entry}]
    try:
        templates = {item["name"]: item["template"] for item in named}
    except (TypeError, KeyError) as error:
        raise _bad_template(f"an entry lacks name or template: {error}") from error
    if not all(isinstance(part, str) for pair in templates.items() for part in pair):
        raise _bad_template("a template is not text")
    return templates


def _bad_template(why: str) -> TokenizerError:
    return TokenizerError(
        "chat_template is neither text nor a list of named texts",
        why=why,
        fix="save the tokenizer again, or remove chat_template from tokenizer_config.json",
    )


def _read_json(file: Path) -> dict[str, Any]:
    """Return the object in a file, empty when there is no such file."""
    if not file.is_file():
        return {}
    try:
        parsed = json.loads(_read_text(file, MAX_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        raise _damaged(file, str(error)) from error
    if not isinstance(parsed, dict):
        raise _damaged(file, f"it holds a {type(parsed).__name__} instead of an object")
    return parsed


def _read_text(file: Path, limit: int) -> str:
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            raise _damaged(file, "it is not a regular file")
        if status.st_size > limit:
            raise _damaged(
                file, f"it has {status.st_size:,} bytes, more than the {limit:,} allowed"
            )
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _damaged(file, str(error)) from error


def _damaged(file: Path, why: str) -> TokenizerError:
    return TokenizerError(
        f"{file.name} cannot be read", why=why[:500], fix=f"get {file} again from its source"
    )
