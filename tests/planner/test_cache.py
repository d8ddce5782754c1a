"""Bytes of keys and values, against real caches and by hand."""

import jax
import pytest
from tiny_models import ONE_EACH

from inferjax.checkpoint.opened import read_model_config
from inferjax.config import Exec
from inferjax.kv.cache import init_cache
from inferjax.kv.cache import token_bytes as kv_token_bytes
from inferjax.planner import Mesh, public_config
from inferjax.planner.cache import (
    chip_read_bytes,
    chip_sequence_bytes,
    read_bytes,
    sequence_bytes,
    token_bytes,
)

FACTORS = 2 * 2  # two bfloat16 factors a token and head


@pytest.mark.parametrize("dtype", ["float32", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("family", ONE_EACH)
def test_cache_bytes_are_those_of_a_real_cache(family, dtype, tiny):
    config = read_model_config(tiny / family)
    page = 16
    cache = jax.eval_shape(
        lambda: init_cache(config, num_pages=4, exec=Exec(page_size=page), dtype=dtype)
    )
    real = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    assert 4 * page * token_bytes(config, dtype) == real
    assert token_bytes(config, dtype) == kv_token_bytes(config, dtype)


def test_llama_3_70b_takes_320_kb_a_token():
    config = public_config("llama-3-70b")
    # keys and values of 8 heads of 128 in 80 layers, 2 bytes each
    assert token_bytes(config, "bfloat16") == 2 * 8 * 128 * 80 * 2 == 320 * 1024
    assert read_bytes(config, 4000, "bfloat16") == pytest.approx(1.3e9, rel=0.01)
    assert token_bytes(config, "int8") == 80 * 8 * (2 * 128 + FACTORS)


def test_deepseek_keeps_a_latent_and_a_rotary_key():
    config = public_config("deepseek-v3")
    assert token_bytes(config, "bfloat16") == 61 * (512 + 64) * 2
    assert token_bytes(config, "int8") == 61 * (512 + 64 + FACTORS)


def test_sequence_takes_whole_pages():
    config = public_config("llama-3-8b")
    one = token_bytes(config, "bfloat16")
    assert sequence_bytes(config, 65, "bfloat16", page_size=64) == 128 * one
    assert read_bytes(config, 65, "bfloat16") == 65 * one


def test_window_caps_what_is_held_and_read():
    config = public_config("gpt-oss-20b")  # 12 layers see 128 tokens, 12 see all
    token = 2 * 8 * 64 * 2
    assert read_bytes(config, 1000, "bfloat16") == token * (12 * 128 + 12 * 1000)
    assert read_bytes(config, 100, "bfloat16") == token * 24 * 100
    # A window of two pages may touch a third.
    held = token * (12 * 3 * 64 + 12 * 1024)
    assert sequence_bytes(config, 1000, "bfloat16", page_size=64) == held


def test_chips_share_heads_and_repeat_what_they_cannot_share():
    config = public_config("llama-3-70b")
    whole = read_bytes(config, 1000, "bfloat16")
    for tp, share in [(1, 1), (4, 1 / 4), (8, 1 / 8), (16, 1 / 8), (3, 1)]:
        mesh = Mesh(tp=tp)
        found = chip_read_bytes(config, mesh, 1000, "bfloat16", sequences=5)
        assert found == 5 * whole * share
        held = chip_sequence_bytes(config, mesh, 1024, "bfloat16", page_size=64)
        assert held == 1024 * 320 * 1024 * share


def test_chips_share_a_latent_by_sequences():
    config = public_config("deepseek-v3")
    one = read_bytes(config, 1000, "bfloat16")
    # 9 sequences on 8 chips: one chip has two of them.
    assert chip_read_bytes(config, Mesh(tp=8), 1000, "bfloat16", sequences=9) == 2 * one
    held = chip_sequence_bytes(config, Mesh(tp=8), 1024, "bfloat16", page_size=64)
    assert held == 1024 * 61 * 576 * 2 / 8
