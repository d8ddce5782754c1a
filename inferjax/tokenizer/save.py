"""Writes a tokenizer as the files that Hugging Face tools and `tokenizer_from_directory` read."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from inferjax.tokenizer.tokenizer import SpecialTokens, Tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and, for the ends of a reply, generation_config.

    What goes around a text is written both as the processor that other tools run and as the flags
    that say so.
    """
    core = tokenizers.Tokenizer.from_str(tokenizer.core.to_str())
    _wrap(core, tokenizer.special)
    core.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", _config(tokenizer))
    if tokenizer.eos_ids:
        eos: Any = list(tokenizer.eos_ids)
        ends = {"eos_token_id": eos if len(eos) > 1 else eos[0], "bos_token_id": tokenizer.bos_id}
        _write(folder / "generation_config.json", {k: v for k, v in ends.items() if v is not None})


def _wrap(core: tokenizers.Tokenizer, special: SpecialTokens) -> None:
    """Let the file's own post-processor put the prefix and suffix around a text."""

    def named(ids: tuple[int, ...]) -> list[tuple[str, int]]:
        return [(core.id_to_token(i) or str(i), i) for i in ids]

    prefix, suffix = named(special.prefix), named(special.suffix)
    around = [token for token, _ in prefix], [token for token, _ in suffix]
    core.post_processor = processors.TemplateProcessing(
        single=[*around[0], "$A", *around[1]],
        pair=[*around[0], "$A", *around[1], *around[0], "$B", *around[1]],
        special_tokens=[*prefix, *suffix],
    )


def _config(tokenizer: Tokenizer) -> dict[str, Any]:
    special = tokenizer.special
    ids = {"bos_token": special.bos, "pad_token": special.pad, "unk_token": special.unk}
    ids["eos_token"] = special.eos[0] if special.eos else None
    named = {key: tokenizer.id_to_token(i) for key, i in ids.items() if i is not None}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": special.bos is not None and special.bos in special.prefix,
        "add_eos_token": bool(special.eos) and special.eos[0] in special.suffix,
        **{key: token for key, token in named.items() if token is not None},
    }
    templates = tokenizer.templates
    if set(templates) == {"default"}:
        config["chat_template"] = templates["default"]
    elif templates:
        config["chat_template"] = [{"name": n, "template": t} for n, t in templates.items()]
    return config


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
