"""What all families share in reading GGUF: metadata as a Hugging Face config, and tensor names."""

from collections.abc import Collection, Mapping
from typing import Any

from inferjax.errors import UnsupportedConfig
from inferjax.models.hf import ConfigReader

# Hugging Face's name of a layer's part -> the name it has in every GGUF file.
LAYER_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
}
TOP_PARTS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
# general.file_type of the formats that are not quantized; the rest is dequantized to 8 good bits.
_FILE_DTYPES = {0: "float32", 1: "float16", 32: "bfloat16"}


def gguf_name(name: str, layer_parts: Mapping[str, str]) -> str | None:
    """Return the GGUF name of a Hugging Face tensor, or None if the format has none."""
    part, _, leaf = name.rpartition(".")
    if part in TOP_PARTS:
        return f"{TOP_PARTS[part]}.{leaf}"
    if not part.startswith("model.layers."):
        return None
    index, _, part = part.removeprefix("model.layers.").partition(".")
    return f"blk.{index}.{layer_parts[part]}.{leaf}" if part in layer_parts else None


def metadata_reader(metadata: Mapping[str, object], architecture: str) -> ConfigReader:
    """Return a strict reader of the keys that describe the architecture, without their prefix."""
    prefix = f"{architecture}."
    own = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    return ConfigReader(
        own,
        where=f"GGUF metadata {prefix}*",
        # The order of the file's tensors before conversion; how many of them were experts.
        ignored={"tensor_data_layout"},
    )


def common_config(
    reader: ConfigReader, metadata: Mapping[str, object], names: Collection[str]
) -> dict[str, Any]:
    """Return the part of a Hugging Face config that all decoder families have in common."""
    dim = reader.integer("embedding_length")
    heads = reader.integer("attention.head_count", high=65_536)
    head_dim = reader.integer("attention.key_length", max(dim // heads, 1))
    reader.expect("attention.value_length", head_dim)
    reader.expect("rope.dimension_count", head_dim)
    reader.expect("expert_count", 0)
    reader.expect("expert_used_count", 0)
    reader.expect("attention.causal", True)
    return {
        "hidden_size": dim,
        "num_hidden_layers": reader.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": reader.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": reader.integer("feed_forward_length"),
        "max_position_embeddings": reader.integer("context_length", high=2**30),
        "rms_norm_eps": reader.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": reader.integer("vocab_size", _num_tokens(metadata)),
        "tie_word_embeddings": "output.weight" not in names,
        "dtype": _FILE_DTYPES.get(_file_type(metadata), "bfloat16"),
        **_token_ids(metadata),
    }


def rope_scaling(reader: ConfigReader) -> dict[str, Any] | None:
    """Return the rope scaling as Hugging Face states it."""
    kinds = {kind: kind for kind in ("none", "linear", "yarn")}
    kind = reader.choice("rope.scaling.type", kinds, "none")
    old_factor = reader.number("rope.scale_linear", None)
    factor = reader.number("rope.scaling.factor", old_factor or 1.0)
    original = reader.integer("rope.scaling.original_context_length", None, high=2**30)
    attention = reader.number("rope.scaling.attn_factor", 1.0)
    # Tells trainers where the weights come from.
    reader.value("rope.scaling.finetuned")
    if kind == "yarn":
        reader.expect("rope.scaling.attn_factor", 1.0)
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    if attention != 1.0:
        reader.refuse("rope.scaling.attn_factor", attention, f"it has no meaning for {kind}")
    if kind == "linear" or (old_factor or 1.0) != 1.0:
        return {"rope_type": "linear", "factor": factor}
    return None


def _num_tokens(metadata: Mapping[str, object]) -> int:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise UnsupportedConfig(
            "GGUF metadata has neither a vocab_size nor tokenizer.ggml.tokens",
            why="the size of the vocabulary is needed",
        )
    return len(tokens)


def _file_type(metadata: Mapping[str, object]) -> int:
    kind = metadata.get("general.file_type")
    return kind if isinstance(kind, int) else -1


def _token_ids(metadata: Mapping[str, object]) -> dict[str, Any]:
    """Return the special ids; the end of a turn ends a reply as the end of text does."""
    kinds = ("bos", "eos", "eot", "eom", "padding")
    ids = {kind: metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in kinds}
    ends = [ids[kind] for kind in ("eos", "eot", "eom") if ids[kind] is not None]
    return {
        "bos_token_id": ids["bos"],
        "eos_token_id": list(dict.fromkeys(ends)),
        "pad_token_id": ids["padding"],
    }
