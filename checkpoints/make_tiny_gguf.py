"""Make tiny GGUF files of the tiny reference checkpoints with llama.cpp's own converter.

    python checkpoints/make_tiny_gguf.py --llama-cpp path/to/llama.cpp [--outtype bf16] [name ...]

Needs torch, transformers 5, tokenizers and a checkout of llama.cpp, none of which the project uses.
The references have no tokenizer, so each gets a small byte-level one, and the converter is told
that it knows it: its weights and its metadata are what the files are for.
"""

import argparse
import importlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 320
SPECIAL = ("<pad>", "<s>", "</s>")
# What keeps a reference's bits, if not bfloat16 does; and 8-bit blocks for the large ones, which
# lose some, as bfloat16 does for references of float32.
OUTTYPES = {
    **dict.fromkeys(("gpt_neox", "gpt_neox_serial", "granite"), "f16"),
    **dict.fromkeys(("deepseek_v3", "gpt_oss", "qwen3_moe"), "q8_0"),
}
# What the converter looks for under names that transformers 5 has given up, or needs to be told.
SETTINGS = {
    "deepseek_v3": {"scoring_func": "sigmoid"},
    "gpt2": {"n_ctx": 128},
    "gpt_neox": {"rotary_pct": 0.25},
    "gpt_neox_serial": {"rotary_pct": 0.25},
}
ROOT = Path(__file__).parent


def main() -> None:
    """Convert the named references, or again those that have been converted before."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama-cpp", type=Path, required=True)
    parser.add_argument("--source", type=Path, default=ROOT / "tiny")
    parser.add_argument("--out", type=Path, default=ROOT / "tiny_gguf")
    parser.add_argument("--outtype", default=None)
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    sys.path.insert(0, str(args.llama_cpp))
    args.out.mkdir(parents=True, exist_ok=True)
    names = args.names or sorted(path.stem for path in args.out.glob("*.gguf"))
    for name in names:
        outtype = args.outtype or OUTTYPES.get(name, "bf16")
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / name
            prepare(args.source / name, model)
            convert(model, args.out / f"{name}.gguf", outtype)
        print(name, outtype, (args.out / f"{name}.gguf").stat().st_size)


def prepare(source: Path, folder: Path) -> None:
    """Copy a reference and add a tokenizer."""
    shutil.copytree(source, folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    tokens = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def make_tokenizer() -> Tokenizer:
    """Return a byte-level BPE of `VOCAB` tokens, the special ones first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    words = (f"{first}{second}{third}" for first in "abcd" for second in "efgh" for third in "ijkl")
    tokenizer.train_from_iterator(list(words) * 2, trainer)
    return tokenizer


def convert(folder: Path, out: Path, outtype: str) -> None:
    """Run the converter, with a byte-level vocabulary whatever the model's own kind is."""
    script = importlib.import_module("convert_hf_to_gguf")
    base = importlib.import_module("conversion.base")
    raw = json.loads((folder / "config.json").read_text())
    model = importlib.import_module("conversion").get_model_class(raw["architectures"][0])
    load, modify = base.ModelBase.load_hparams, model.modify_tensors

    def load_settings(*args: Any, **options: Any) -> dict[str, Any]:
        return {**load(*args, **options), **SETTINGS.get(folder.name, {})}

    def modify_tensors(*args: Any) -> Iterator[Any]:
        # StableLM's returns from a generator what it means to yield: its stacked norms were lost.
        converted = modify(*args)
        if isinstance(converted, Iterator):
            yield from (yield from converted) or ()
        else:
            yield from converted

    # The folder's name would become the model's, by which llama.cpp guesses about vocabularies.
    argv = ["convert", str(folder), "--outfile", str(out), "--outtype", outtype]
    argv += ["--model-name", "tiny"]
    with (
        mock.patch.object(sys, "argv", argv),
        mock.patch.object(base.ModelBase, "load_hparams", staticmethod(load_settings)),
        mock.patch.object(model, "set_vocab", write_vocabulary),
        mock.patch.object(model, "modify_tensors", modify_tensors),
    ):
        allow_dense_layers(base.gguf)
        script.main()


def allow_dense_layers(gguf: Any) -> None:
    """Let a mixture of experts have dense layers too, which the converter has no names for."""
    tensors = gguf.MODEL_TENSORS[gguf.MODEL_ARCH.QWEN2MOE]
    dense = [gguf.MODEL_TENSOR[name] for name in ("FFN_GATE", "FFN_UP", "FFN_DOWN")]
    tensors += [tensor for tensor in dense if tensor not in tensors]


def write_vocabulary(model: Any) -> None:
    """Write the tokens of tokenizer.json, as they are."""
    gguf = importlib.import_module("gguf")
    vocab = make_tokenizer().get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer = model.gguf_writer
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds[token not in SPECIAL] for token in tokens])
    gguf.SpecialVocab(model.dir_model, load_merges=True).add_to_gguf(writer)


if __name__ == "__main__":
    main()
