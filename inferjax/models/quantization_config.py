"""What a config says of how its checkpoint's linear layers are quantized.

Which layers are, the tensors say themselves: a layer is quantized where it has `qweight`. Keys that
name layers (`modules_to_not_convert`, `modules_in_block_to_quantize`, `lm_head`) are therefore not
needed, and `dynamic`, which gives some layers other bits or groups, only means that each layer's
shapes decide.

Source: transformers' GPTQConfig and AwqConfig, AutoGPTQ's and GPTQModel's quantize_config.json,
AutoAWQ's quant_config.json.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from inferjax.errors import UnsupportedModel
from inferjax.models.hf import ConfigReader

KEY = "quantization_config"
_WHERE = f"config.json: {KEY}"
_MAX_GROUP = 2**24
BITS: Mapping[str, tuple[int, ...]] = {"awq": (4,), "gptq": (2, 3, 4, 8)}

_LAYER_NAMES = {"modules_to_not_convert", "modules_in_block_to_quantize", "lm_head"}
_LAYER_NAMES |= {"block_name_to_quantize", "module_name_preceding_first_block"}
# How the weights were found, and on which text.
_HOW_MADE = {"damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "mse"}
_HOW_MADE |= {
    "act_group_aware",
    "hyb_act",
    "group_aware_reordering",
    "dataset",
    "tokenizer",
    "batch_size",
    "pad_token_id",
}
_HOW_MADE |= {"model_seqlen", "cache_block_outputs", "model_name_or_path", "model_file_base_name"}
# Which kernel other libraries run, and what they fuse for it.
_HOW_RUN = {"backend", "use_exllama", "use_exllama_v2", "disable_exllama", "exllama_config"}
_HOW_RUN |= {"use_cuda_fp16", "max_input_length", "do_fuse", "fuse_max_seq_len", "modules_to_fuse"}
_IGNORED = frozenset(_LAYER_NAMES | _HOW_MADE | _HOW_RUN)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredFormat:
    """How linear layers are stored: integers of `bits`, `group` inputs sharing a scale and a zero.

    `group` 0 is all inputs. `symmetric` promises that every zero is the middle of the range.
    `act_order` says whether inputs belong to groups in any order; None leaves it open. `offset` was
    subtracted from the zeros when they were packed: from whole words if `borrows`, else from each
    by itself. `varies` lets a layer have other bits and another group.
    """

    method: Literal["awq", "gptq"]
    bits: int
    group: int
    symmetric: bool = False
    act_order: bool | None = False
    offset: int = 0
    borrows: bool = False
    varies: bool = False

    @property
    def label(self) -> str:
        """The format in words, such as "gptq, 4 bits, groups of 128, act-order"."""
        group = f"groups of {self.group}" if self.group else "one group"
        parts = [self.method, f"{self.bits} bits", group]
        parts += ["some layers differ"] if self.varies else []
        return ", ".join([*parts, "act-order"] if self.act_order else parts)


def read_quantization(raw: Mapping[str, Any]) -> StoredFormat | None:
    """Return how a config's checkpoint is quantized; None if it is not.

    Raises: UnsupportedModel for a method that is not read, UnsupportedConfig for a key or value
      that is not understood.
    """
    found = raw.get(KEY)
    if found is None:
        return None
    method = found.get("quant_method", found.get("method")) if isinstance(found, dict) else found
    if not isinstance(found, dict) or not isinstance(method, str) or method not in _READERS:
        raise UnsupportedModel(
            f"config.json: the weights are quantized ({str(method)[:40]})",
            why=f"of quantized safetensors checkpoints {' and '.join(_READERS)} are read",
            fix="use one of these, a float32, float16 or bfloat16 checkpoint, or a GGUF file",
            key=KEY,
        )
    reader = ConfigReader(found, where=_WHERE, ignored=_IGNORED)
    reader.expect("quant_method", method)
    reader.expect("method", method)
    stored = _READERS[method](reader)
    reader.finish()
    return stored


def _read_gptq(reader: ConfigReader) -> StoredFormat:
    # Another layout, a low-rank addition to each product, rotated inputs: all change the values.
    reader.expect("is_marlin_format", False)
    reader.expect("pack_dtype", "int32")
    for key in ("adapter", "rotation"):
        reader.expect(key, {})
    offsets = {"gptq": 1, "gptq_v2": 0}
    varies = _varies(reader)
    symmetric, act_order = reader.flag("sym", False), reader.flag("desc_act", False)
    if varies or reader.value("desc_act") is None:
        act_order = None
    return StoredFormat(
        method="gptq",
        bits=_bits(reader, "bits", BITS["gptq"]),
        group=_group(reader, "group_size"),
        symmetric=symmetric and not varies,
        act_order=act_order,
        offset=reader.choice(_given(reader, "checkpoint_format", "format"), offsets, "gptq"),
        borrows="gptqmodel" in str(_quantizer(reader)),
        varies=varies,
    )


def _read_awq(reader: ConfigReader) -> StoredFormat:
    reader.expect("zero_point", True)
    reader.expect("desc_act", False)
    reader.expect("pack_dtype", "int32")
    reader.expect(_given(reader, "version", "format", "checkpoint_format"), "gemm", "GEMM")
    reader.flag("sym", False)  # what was asked of the quantizer: the zeros are stored either way
    return StoredFormat(
        method="awq",
        bits=_bits(reader, _given(reader, "bits", "w_bit"), BITS["awq"]),
        group=_group(reader, _given(reader, "group_size", "q_group_size")),
        varies=_varies(reader),
    )


_READERS = {"awq": _read_awq, "gptq": _read_gptq}


def _given(reader: ConfigReader, *names: str) -> str:
    """Return which of a setting's names the config uses; several must agree."""
    used = [name for name in names if reader.value(name) is not None]
    for name in used[1:]:
        reader.expect(name, reader.value(used[0]))
    return used[0] if used else names[0]


def _bits(reader: ConfigReader, key: str, known: tuple[int, ...]) -> int:
    bits = reader.integer(key)
    if bits not in known:
        reader.refuse(key, bits, f"it must be {' or '.join(map(str, known))}")
    return bits


def _group(reader: ConfigReader, key: str) -> int:
    """Return the inputs that share a scale; -1 is all of them."""
    group = reader.integer(key, low=-1, high=_MAX_GROUP)
    if group == 0:
        reader.refuse(key, group, "it must be -1 or a number of inputs")
    return max(group, 0)


def _varies(reader: ConfigReader) -> bool:
    """Tell whether layers may have bits and groups of their own, by either name of that setting."""
    return any(reader.value(key) for key in ("dynamic", "dynamic_bits"))


def _quantizer(reader: ConfigReader) -> object:
    """Return the name and version of what wrote the checkpoint."""
    meta = reader.value("meta")
    return meta.get("quantizer") if isinstance(meta, dict) else None
