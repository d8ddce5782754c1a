"""Make tiny reference checkpoints: random weights, and what Hugging Face transformers computes.

    python checkpoints/make_tiny.py [--out checkpoints/tiny] [name ...]

Needs torch and transformers 5, which the project itself does not use. Each folder is written,
then read again by transformers in float32 with eager attention, so the expected arrays follow from
exactly the stored weights and the stored config.json. A checkpoint is refused when its test data
has no teeth: when a changed setting moves the logits too little, when the greedy continuation is
dull or hangs on a near tie, or when a small disturbance of the embeddings is blown up.
"""

import argparse
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_specs import (
    CONTEXT,
    FULL,
    LENGTH,
    NEW,
    PROMPT,
    VOCAB,
    Spec,
    families,
    heads,
    residual_variants,
    window_variants,
)
from torch import nn

ROW_LENGTHS = (40, 17, 5)
MIN_TEETH, MIN_GAP, MIN_DISTINCT, MAX_DRIFT = 0.05, 0.005, 10, 0.001


def randomise(model: nn.Module, seed: int) -> None:
    """Draw every parameter, so that no norm is one, no bias zero and attention is sharp."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    conv = {m.weight for m in model.modules() if type(m).__name__ == "Conv1D"}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    tied = head is not None and any(head.weight is e for e in embeddings)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if "norm" in name or "ln_" in name:
            is_bias = name.endswith("bias")
            drawn = 0.2 * noise if is_bias else 0.5 + torch.rand(weight.shape, generator=generator)
        elif weight.ndim == 1:
            drawn = 0.1 * noise
        elif weight in embeddings:
            drawn = noise / 4 if tied else noise
        else:
            fan_in = weight.shape[0] if weight in conv else weight.shape[-1]
            drawn = gain(name) * noise / math.sqrt(fan_in)
        weight.data.copy_(drawn)


def gain(name: str) -> float:
    """Return how much larger than unit variance a matrix maps: queries, keys and routers more."""
    sharp = ("q_proj", "k_proj", "q_b_proj", "qkv_proj", "query_key_value", "c_attn", "kv_b_proj")
    if any(part in name for part in sharp):
        return 1.6
    return 2.0 if name.endswith(("gate.weight", "router.weight")) else 1.0


def level(model: nn.Module, spec: Spec, tokens: torch.Tensor) -> None:
    """Scale the last matrix or norm until the outputs have a standard deviation near one."""
    if spec.kind == "embedding":
        return
    spread = float(torch.stack([run(model, row[None])[0] for row in tokens]).std())
    parameters = dict(model.named_parameters())
    last = ("lm_head.weight", "embed_out.weight", "score.weight", "project_out.weight")
    found = [k for k in parameters if k.endswith(last)]
    found = found or [k for k in parameters if k.split(".layers.")[0] == k and "norm" in k]
    for name in found:
        parameters[name].data.div_(spread)


@torch.no_grad()
def run(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits, the scores or the last hidden states, without a cache."""
    output = model(input_ids=tokens, use_cache=False)
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


def old_style(config: dict, spec: Spec) -> dict:
    """Return config.json as transformers 4 wrote it."""
    config = dict(config)
    scaling = config.pop("rope_parameters", None)
    if scaling is not None:
        scaling = dict(scaling.get(FULL, scaling))
        config["rope_theta"] = scaling.pop("rope_theta")
        if "partial_rotary_factor" in scaling:
            config["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
        kind = scaling.pop("rope_type")
        if spec.model == "Phi3ForCausalLM":
            scaling.pop("original_max_position_embeddings")
        config["rope_scaling"] = None if kind == "default" else {spec.scaling_key: kind} | scaling
    dropped = {"head_dim", "qk_head_dim"} if config["model_type"] == "deepseek_v2" else set()
    if config["model_type"] != "olmo3":
        dropped.add("layer_types")
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.48.0" if "layer_types" in dropped else "4.57.0"
    return {k: v for k, v in config.items() if k not in dropped}


def write(folder: Path, model: nn.Module, spec: Spec) -> None:
    """Write weights and config.json, under the names that hub checkpoints have."""
    shutil.rmtree(folder, ignore_errors=True)
    model.to(getattr(torch, spec.dtype)).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    weights = folder / "model.safetensors"
    if spec.strip or spec.masks:
        tensors = {k.removeprefix(spec.strip): v for k, v in load_file(weights).items()}
        tensors |= masks(model.config.num_hidden_layers) if spec.masks else {}
        save_file(tensors, weights, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config = (old_style(config, spec) if spec.old else config) | spec.edits
    dump(folder / "config.json", dict(sorted(config.items())))
    if spec.kind == "embedding":
        write_sentence_transformers(folder, spec)


def masks(num_layers: int) -> dict[str, torch.Tensor]:
    """Return the buffers that GPT-NeoX checkpoints such as Pythia hold beside their weights."""
    buffers = {
        "bias": torch.ones(1, 1, CONTEXT, CONTEXT, dtype=torch.bool).tril(),
        "masked_bias": torch.tensor(-1e9),
        "rotary_emb.inv_freq": torch.tensor([1.0, 0.01]),
    }
    prefixes = [f"gpt_neox.layers.{i}.attention" for i in range(num_layers)]
    return {f"{p}.{k}": v.clone() for p in prefixes for k, v in buffers.items()}


def dump(path: Path, value: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_sentence_transformers(folder: Path, spec: Spec) -> None:
    """Write the files by which sentence-transformers knows how to pool."""
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
    modes += ("weightedmean_tokens", "lasttoken")
    pooling = {f"pooling_mode_{mode}": mode == spec.pooling for mode in modes}
    pooling = {"word_embedding_dimension": 64} | pooling | {"include_prompt": True}
    dump(folder / "1_Pooling" / "config.json", pooling)
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling")]
    kinds += [("2_Normalize", "Normalize")] if spec.normalize else []
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds)
    ]
    dump(folder / "modules.json", entries)
    prompt = "Instruct: Given a web search query, retrieve passages that answer it\nQuery:"
    prompts = {"query": prompt, "document": ""} if spec.normalize else {}
    settings = {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    dump(folder / "config_sentence_transformers.json", settings)


def read(folder: Path, spec: Spec, overrides: dict | None = None) -> nn.Module:
    """Load a folder in float32, with some settings changed; refuse left-over or missing tensors."""
    config = transformers.AutoConfig.from_pretrained(folder)
    for path, value in (overrides or {}).items():
        *parents, name = path.split(".")
        target = config
        for parent in parents:
            target = getattr(config, parent) if target is config else target[parent]
        target.__setitem__(name, value) if parents else setattr(config, name, value)
    model, notes = getattr(transformers, spec.model).from_pretrained(
        folder,
        config=config,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    if overrides is None and (notes["missing_keys"] or notes["unexpected_keys"]):
        raise ValueError(f"{folder.name}: tensors do not fit: {notes}")
    return model.eval()


def continue_greedily(model: nn.Module, prompt: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return the greedy continuation and the smallest lead of a winner over the second."""
    tokens, smallest = prompt, math.inf
    for _ in range(NEW):
        top = run(model, tokens)[:, -1].topk(2)
        smallest = min(smallest, float((top.values[:, 0] - top.values[:, 1]).min()))
        tokens = torch.cat([tokens, top.indices[:, :1]], dim=1)
    return tokens[:, PROMPT:], smallest


def drift(model: nn.Module, tokens: torch.Tensor, before: torch.Tensor) -> float:
    """Return how far the outputs move, in their deviation, when embeddings are off by 1e-5."""
    weight = model.get_input_embeddings().weight
    kept = weight.data.clone()
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    weight.data.mul_(1 + 1e-5 * noise)
    moved = float((run(model, tokens) - before).abs().max() / before.std())
    weight.data.copy_(kept)
    return moved


def expect_causal(folder: Path, spec: Spec, rng: np.random.Generator) -> dict | None:
    """Return the expected arrays of a language model, or None where this seed is unsuitable."""
    model = read(folder, spec)
    tokens = torch.from_numpy(rng.integers(3, VOCAB, (2, LENGTH)))
    prompt = torch.from_numpy(rng.integers(3, VOCAB, (2, PROMPT)))
    logits = run(model, tokens)
    greedy, gap = continue_greedily(model, prompt)
    distinct = min(len(set(row.tolist())) for row in greedy)
    moved = drift(model, tokens, logits)
    if gap < MIN_GAP or distinct < MIN_DISTINCT or moved > MAX_DRIFT:
        return None
    changed = [run(read(folder, spec, overrides), tokens) for overrides in spec.teeth]
    bites = [float((other - logits).abs().max() / logits.std()) for other in changed]
    print(f"{folder.name}: std {logits.std():.2f} gap {gap:.4f} distinct {distinct}", end=" ")
    print(f"drift {moved:.1e} teeth {[round(bite, 3) for bite in bites]}")
    if min(bites) < MIN_TEETH:
        return None
    arrays = {"tokens": tokens, "logits": logits, "greedy_prompt": prompt, "greedy": greedy}
    return {k: v.numpy() for k, v in arrays.items()}


def rows(rng: np.random.Generator) -> Iterator[np.ndarray]:
    for length in ROW_LENGTHS:
        yield rng.integers(3, VOCAB, (1, length))


def expect_head(folder: Path, spec: Spec, rng: np.random.Generator) -> dict:
    """Return the expected arrays of a classifier or an embedding model, each row by itself."""
    model = read(folder, spec)
    tokens = np.zeros((len(ROW_LENGTHS), LENGTH), np.int64)
    results = []
    for i, row in enumerate(rows(rng)):
        tokens[i, : row.shape[1]] = row
        result = run(model, torch.from_numpy(row))[0]
        if spec.pooling:
            result = result[-1] if spec.pooling == "lasttoken" else result.mean(0)
        results.append(nn.functional.normalize(result, dim=0) if spec.normalize else result)
    stacked = torch.stack(results).numpy()
    print(f"{folder.name}: {spec.kind} {stacked.shape} std {stacked.std():.2f}")
    name = "scores" if spec.kind == "classifier" else "embeddings"
    return {"tokens": tokens, "lengths": np.array(ROW_LENGTHS), name: stacked}


def make(name: str, spec: Spec, out: Path) -> None:
    """Write one folder, with the first seed whose test data has teeth."""
    config_class = getattr(transformers, spec.model).config_class
    for seed in range(200):
        model = getattr(transformers, spec.model)(config_class(**spec.config)).eval()
        randomise(model, seed)
        rng = np.random.default_rng(seed)
        level(model, spec, torch.from_numpy(rng.integers(3, VOCAB, (8, LENGTH))))
        write(out / name, model, spec)
        arrays = (expect_causal if spec.kind == "causal" else expect_head)(out / name, spec, rng)
        if arrays is not None:
            narrow = {
                k: v.astype(np.int32) if v.dtype == np.int64 else v for k, v in arrays.items()
            }
            np.savez_compressed(out / name / "expected.npz", **narrow)
            return
    raise ValueError(f"{name}: no seed gives test data with teeth")


def main() -> None:
    specs = families() | residual_variants() | window_variants() | heads()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="name", help=f"some of: {', '.join(specs)}")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "tiny")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in arguments.names or specs:
        make(name, specs[name], arguments.out)


if __name__ == "__main__":
    main()
