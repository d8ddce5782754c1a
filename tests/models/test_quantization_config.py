"""`quantization_config`: every key is used, known to have no effect, or an error that names it."""

import pytest

from inferjax.errors import UnsupportedConfig, UnsupportedModel
from inferjax.models.quantization_config import StoredFormat, read_quantization

# As published checkpoints have them.
AUTO_GPTQ = {
    "bits": 4,
    "damp_percent": 0.1,
    "desc_act": True,
    "group_size": 128,
    "model_file_base_name": "model",
    "model_name_or_path": None,
    "quant_method": "gptq",
    "sym": True,
    "true_sequential": True,
}
OPTIMUM = {
    "batch_size": 1,
    "bits": 4,
    "block_name_to_quantize": None,
    "cache_block_outputs": True,
    "damp_percent": 0.1,
    "dataset": None,
    "desc_act": False,
    "exllama_config": {"version": 1},
    "group_size": 128,
    "max_input_length": None,
    "model_seqlen": None,
    "module_name_preceding_first_block": None,
    "modules_in_block_to_quantize": None,
    "pad_token_id": None,
    "quant_method": "gptq",
    "sym": True,
    "tokenizer": None,
    "true_sequential": True,
    "use_cuda_fp16": False,
    "use_exllama": True,
}
GPTQ_MODEL = {
    "bits": 4,
    "checkpoint_format": "gptq",
    "desc_act": False,
    "dynamic": {"-:.*down.*": {}},
    "format": "gptq",
    "group_size": 64,
    "lm_head": False,
    "meta": {"quantizer": ["gptqmodel:2.2.0"], "damp_percent": 0.05, "mse": 0.0},
    "method": "gptq",
    "pack_dtype": "int32",
    "quant_method": "gptq",
    "sym": False,
    "true_sequential": True,
}
AUTO_AWQ = {
    "bits": 4,
    "group_size": 128,
    "modules_to_not_convert": ["lm_head"],
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}
OLD_AWQ = {
    "quant_method": "awq",
    "zero_point": True,
    "q_group_size": -1,
    "w_bit": 4,
    "version": "GEMM",
}


def read(found):
    return read_quantization({"model_type": "llama", "quantization_config": found})


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (None, None),
        (
            AUTO_GPTQ,
            StoredFormat(
                method="gptq", bits=4, group=128, symmetric=True, act_order=True, offset=1
            ),
        ),
        (OPTIMUM, StoredFormat(method="gptq", bits=4, group=128, symmetric=True, offset=1)),
        (
            GPTQ_MODEL,
            StoredFormat(
                method="gptq",
                bits=4,
                group=64,
                act_order=None,
                offset=1,
                borrows=True,
                varies=True,
            ),
        ),
        (AUTO_AWQ, StoredFormat(method="awq", bits=4, group=128)),
        (OLD_AWQ, StoredFormat(method="awq", bits=4, group=0)),
    ],
)
def test_published_configs_are_understood(found, wanted):
    assert read(found) == wanted


def test_keys_that_are_absent_promise_nothing():
    stored = read({"quant_method": "gptq", "bits": 8, "group_size": -1})
    assert stored == StoredFormat(method="gptq", bits=8, group=0, act_order=None, offset=1)
    assert read(AUTO_GPTQ | {"checkpoint_format": "gptq_v2"}).offset == 0


def test_what_overrides_layers_keeps_promises_for_none():
    stored = read(AUTO_GPTQ | {"dynamic": {".*": {"sym": False}}})
    assert (stored.symmetric, stored.act_order, stored.varies) == (False, None, True)
    assert read(AUTO_GPTQ | {"dynamic": {}, "hyb_act": False}).symmetric
    assert read(AUTO_GPTQ | {"dynamic_bits": {".*": 8}}).varies
    assert read(AUTO_AWQ | {"dynamic": {".*": {"group_size": 32}}}).varies


@pytest.mark.parametrize(
    ("base", "change", "text"),
    [
        (AUTO_GPTQ, {"bits": 5}, "bits is 5"),
        (AUTO_GPTQ, {"bits": None}, "no bits"),
        (AUTO_GPTQ, {"bits": "4"}, "bits is '4'"),
        (AUTO_GPTQ, {"group_size": 0}, "group_size is 0"),
        (AUTO_GPTQ, {"group_size": -2}, "group_size is -2"),
        (AUTO_GPTQ, {"group_size": None}, "no group_size"),
        (AUTO_GPTQ, {"sym": "yes"}, "sym is 'yes'"),
        (AUTO_GPTQ, {"desc_act": 1}, "desc_act is 1"),
        (AUTO_GPTQ, {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        (AUTO_GPTQ, {"checkpoint_format": "gptq", "format": "gptq_v2"}, "format is 'gptq_v2'"),
        (AUTO_GPTQ, {"is_marlin_format": True}, "is_marlin_format is True"),
        (AUTO_GPTQ, {"pack_dtype": "int64"}, "pack_dtype is 'int64'"),
        (AUTO_GPTQ, {"rotation": "hadamard"}, "rotation is 'hadamard'"),
        (AUTO_GPTQ, {"adapter": {"path": "x"}}, "adapter is"),
        (AUTO_GPTQ, {"method": "awq"}, "method is 'awq'"),
        (AUTO_GPTQ, {"new_idea": 1}, "new_idea"),
        (AUTO_AWQ, {"bits": 8}, "bits is 8"),
        (AUTO_AWQ, {"bits": None}, "no bits"),
        (AUTO_AWQ, {"w_bit": 3}, "w_bit is 3"),
        (AUTO_AWQ, {"zero_point": False}, "zero_point is False"),
        (AUTO_AWQ, {"version": "gemv"}, "version is 'gemv'"),
        (AUTO_AWQ, {"desc_act": True}, "desc_act is True"),
        (AUTO_AWQ, {"new_idea": 1}, "new_idea"),
    ],
)
def test_what_is_not_understood_is_named(base, change, text):
    with pytest.raises(UnsupportedConfig, match=text):
        read(base | change)


@pytest.mark.parametrize(
    "found",
    [
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "compressed-tensors"},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": ["gptq"]},
        {"bits": 4},
        "awq",
    ],
)
def test_other_methods_are_refused_by_name(found):
    method = found.get("quant_method") if isinstance(found, dict) else found
    with pytest.raises(UnsupportedModel, match="quantized") as error:
        read(found)
    assert str(method) in str(error.value)
    assert error.value.key == "quantization_config"


def test_the_format_is_put_in_words():
    assert read(AUTO_GPTQ).label == "gptq, 4 bits, groups of 128, act-order"
    assert read(OLD_AWQ).label == "awq, 4 bits, one group"
    assert "some layers differ" in read(GPTQ_MODEL).label
