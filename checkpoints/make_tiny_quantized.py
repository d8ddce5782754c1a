"""Make tiny AWQ and GPTQ checkpoints with the packing code of the tools that publish such files.

    python checkpoints/make_tiny_quantized.py --auto-awq AutoAWQ --auto-gptq AutoGPTQ [name ...]

Needs torch, transformers 5 and checkouts of both tools, none of which the project uses. Weights are
random and rounded to nearest: the files are about the layout. `expected.npz` holds the logits that
transformers computes in float32 from what the tools' own code unpacks.
"""

import argparse
import importlib
import json
import math
import shutil
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

LENGTH = 20
BASE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Spec:
    """One checkpoint: a class of transformers, how its layers are packed, and which are not."""

    model: str
    method: str
    bits: int = 4
    group: int = 32
    symmetric: bool = False
    act_order: bool = False
    keep: tuple[str, ...] = ()
    config: dict = field(default_factory=dict)


SPECS = {
    "awq": Spec("LlamaForCausalLM", "awq", group=16, keep=("v_proj",)),
    "gptq": Spec("Qwen2ForCausalLM", "gptq", symmetric=True, group=-1, bits=8),
    "gptq_act_order": Spec("LlamaForCausalLM", "gptq", act_order=True),
    "gptq_3_bits": Spec("LlamaForCausalLM", "gptq", bits=3),
}


def load_tools(auto_awq: Path, auto_gptq: Path) -> tuple[types.ModuleType, types.ModuleType]:
    """Import two modules without their packages, which need other versions of transformers."""
    places = {
        "awq": auto_awq / "awq",
        "awq.utils": auto_awq / "awq/utils",
        "awq.modules": auto_awq / "awq/modules",
        "awq.modules.linear": auto_awq / "awq/modules/linear",
        "auto_gptq": auto_gptq / "auto_gptq",
        "auto_gptq.nn_modules": auto_gptq / "auto_gptq/nn_modules",
        "auto_gptq.nn_modules.qlinear": auto_gptq / "auto_gptq/nn_modules/qlinear",
    }
    for name, place in places.items():
        package = types.ModuleType(name)
        package.__path__ = [str(place)]
        sys.modules[name] = package
    sys.modules["awq.utils.utils"] = mock.Mock(get_best_device=lambda: "cpu")
    awq = importlib.import_module("awq.modules.linear.gemm")
    return awq, importlib.import_module("auto_gptq.nn_modules.qlinear.qlinear_cuda")


def choose_grid(
    weight: torch.Tensor, groups: torch.Tensor, spec: Spec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and zeros [out, groups]; AutoGPTQ cannot pack a zero of 0."""
    top = 2**spec.bits - 1
    scales, zeros = [], []
    for group in range(int(groups.max()) + 1):
        part = weight[:, groups == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if spec.symmetric:
            scale, zero = 2 * torch.maximum(high, -low) / top, torch.full_like(low, (top + 1) / 2)
        else:
            scale = (high - low) / top
            zero = torch.round(-low / scale).clamp(1, top)
        scales.append(scale.half().float())
        zeros.append(zero)
    return torch.stack(scales, 1), torch.stack(zeros, 1)


def pack_layer(
    layer: nn.Linear, spec: Spec, order: torch.Tensor, awq: types.ModuleType, gptq: types.ModuleType
) -> dict[str, torch.Tensor]:
    """Return a layer's tensors, and leave in it the weight that the tool unpacks."""
    num_out, num_in = layer.weight.shape
    group = num_in if spec.group == -1 else spec.group
    groups = torch.arange(num_in) // group
    groups = groups[order] if spec.act_order else groups
    scales, zeros = choose_grid(layer.weight.data, groups, spec)
    codes = (layer.weight / scales[:, groups] + zeros[:, groups]).round().clamp(0, 2**spec.bits - 1)
    layer.weight.data = (codes - zeros[:, groups]) * scales[:, groups]
    bare = nn.Linear(num_in, num_out, bias=False)
    bare.weight.data = layer.weight.data.clone()
    if spec.method == "awq":
        packed = awq.WQLinear_GEMM.from_linear(
            bare, 4, group, False, scales.T.contiguous(), zeros.T.contiguous()
        )
        parts = (packed.qweight, packed.qzeros, packed.scales.float(), 4, group)
        unpacked = awq.dequantize_gemm(*parts)
    else:
        packed = gptq.QuantLinear(
            spec.bits, spec.group, num_in, num_out, False, weight_dtype=torch.float32
        )
        packed.pack(bare, scales, zeros.clone(), groups.int())
        unpacked = packed(torch.eye(num_in))
    layer.weight.data = unpacked.T.float().contiguous()
    names = ("qweight", "qzeros", "scales") + (("g_idx",) if spec.method == "gptq" else ())
    tensors = {name: getattr(packed, name) for name in names}
    return tensors | {"scales": packed.scales.half()}


@torch.no_grad()
def make(name: str, spec: Spec, out: Path, *tools: types.ModuleType) -> None:
    """Write one folder."""
    torch.manual_seed(len(name))
    model_class = getattr(transformers, spec.model)
    model = model_class(model_class.config_class(**BASE)).float().eval()
    for weight in model.parameters():
        noise = torch.randn(weight.shape)
        drawn = noise / math.sqrt(weight.shape[-1]) if weight.ndim > 1 else 1 + 0.1 * noise
        weight.data.copy_(drawn.half())
    tensors = {key: value.half() for key, value in model.state_dict().items()}
    orders: dict[str, torch.Tensor] = {}
    for path, layer in model.named_modules():
        if not isinstance(layer, nn.Linear) or path.endswith(("lm_head", *spec.keep)):
            continue
        # Layers that read the same vector are calibrated on it alike.
        reads = path if path.endswith(("o_proj", "down_proj")) else path.rpartition(".")[0]
        order = orders.setdefault(reads, torch.randperm(layer.in_features))
        del tensors[f"{path}.weight"]
        parts = pack_layer(layer, spec, order, *tools)
        tensors |= {f"{path}.{part}": value.contiguous() for part, value in parts.items()}
    tokens = torch.randint(3, BASE["vocab_size"], (2, LENGTH))
    logits = model(input_ids=tokens, use_cache=False).logits
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_config(folder, model, spec)
    arrays = {"tokens": tokens.numpy().astype(np.int32), "logits": logits.numpy()}
    np.savez_compressed(folder / "expected.npz", **arrays)
    print(name, f"std {float(logits.std()):.2f}", sum(f.stat().st_size for f in folder.iterdir()))


def write_config(folder: Path, model: nn.Module, spec: Spec) -> None:
    """Write config.json with `quantization_config` as the tool has it."""
    found = {"quant_method": spec.method, "bits": spec.bits, "group_size": spec.group}
    if spec.method == "awq":
        found |= {"version": "gemm", "zero_point": True, "modules_to_not_convert": list(spec.keep)}
    else:
        found |= {"sym": spec.symmetric, "desc_act": spec.act_order, "damp_percent": 0.01}
        found |= {"true_sequential": True, "checkpoint_format": "gptq"}
    config = json.loads(model.config.to_json_string(use_diff=False))
    kept = {key: config[key] for key in (*BASE, "model_type", "rms_norm_eps", "rope_parameters")}
    kept |= {"architectures": [spec.model], "dtype": "float16", "quantization_config": found}
    (folder / "config.json").write_text(json.dumps(dict(sorted(kept.items())), indent=2) + "\n")


def main() -> None:
    """Make the named checkpoints, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--auto-awq", type=Path, required=True)
    parser.add_argument("--auto-gptq", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "tiny_quantized")
    parser.add_argument("names", nargs="*", metavar="name", help=f"some of: {', '.join(SPECS)}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tools = load_tools(args.auto_awq, args.auto_gptq)
    for name in args.names or SPECS:
        make(name, SPECS[name], args.out, *tools)


if __name__ == "__main__":
    main()
