"""Bytes, operations and messages of a step, by hand."""

import dataclasses

import pytest
from tiny_models import FAMILIES, tiny_model

from inferjax.bench import costs
from inferjax.config import Exec, Router
from inferjax.kv.cache import init_cache
from inferjax.planner import Mesh, make_model, public_config
from inferjax.planner.work import (
    body_flops,
    decode_work,
    head_flops,
    messages,
    prefill_work,
    share_of_experts,
    weight_bytes,
)

# 8B: wqkv, wo, gate and up, down of a layer.
LAYER = 4096 * (32 + 2 * 8) * 128 + 32 * 128 * 4096 + 3 * 4096 * 14_336
HEAD = 128_256 * 4096


@pytest.fixture(scope="module")
def llama():
    return make_model(public_config("llama-3-8b"))


def test_token_takes_two_operations_a_weight(llama):
    assert body_flops(llama, Mesh()) == 2 * 32 * LAYER
    assert head_flops(llama, Mesh()) == 2 * HEAD
    assert body_flops(llama, Mesh(tp=4)) == 2 * 32 * LAYER / 4


def test_decode_attends_to_the_context(llama):
    work = decode_work(llama, Mesh(), batch=3, context=1000)
    # scores and sums over 32 heads of 128 in 32 layers, two operations each
    assert work.attention_flops == 3 * 1000 * 32 * 4 * 32 * 128
    assert work.product_flops == 3 * 2 * (32 * LAYER + HEAD)
    assert work.kv_bytes == 3 * 1000 * 32 * 2 * 8 * 128 * 2


def test_verifying_drafts_multiplies_products_but_reads_the_cache_once(llama):
    plain = decode_work(llama, Mesh(), batch=3, context=1000)
    verify = decode_work(llama, Mesh(), batch=3, context=1000, tokens_per_sequence=5)
    assert verify.product_flops == 5 * plain.product_flops
    assert verify.kv_bytes == plain.kv_bytes


def test_prefill_attends_to_what_comes_before(llama):
    work = prefill_work(llama, Mesh(), start=0, stop=100)
    assert work.attention_flops == 100 * 101 / 2 * 32 * 4 * 32 * 128
    # The head multiplies the last token only.
    assert work.product_flops == 2 * (100 * 32 * LAYER + HEAD)
    later = prefill_work(llama, Mesh(), start=60, stop=100)
    pairs = 100 * 101 / 2 - 60 * 61 / 2
    assert later.attention_flops == pairs * 32 * 4 * 32 * 128
    assert later.kv_bytes == 60 * 32 * 2 * 8 * 128 * 2
    first = prefill_work(llama, Mesh(), start=0, stop=60, last=False)
    assert first.product_flops + later.product_flops == work.product_flops


def test_prefill_of_a_window_attends_to_it_only():
    model = make_model(public_config("gpt-oss-20b"))
    work = prefill_work(model, Mesh(), start=0, stop=200)
    pairs = 12 * (200 * 201 / 2) + 12 * (128 * 129 / 2 + 72 * 128)
    assert work.attention_flops == pairs * 4 * 64 * 64


def test_latent_attention_scores_the_latent():
    model = make_model(public_config("deepseek-v3"))
    work = decode_work(model, Mesh(), batch=1, context=10)
    assert work.attention_flops == 10 * 61 * 128 * 2 * ((512 + 64) + 512)


def test_untied_embedding_is_read_at_the_tokens_rows(llama):
    table = 128_256 * 4096 * 2
    assert weight_bytes(llama, Mesh(), 1) == llama.weight_bytes - table + 4096 * 2
    tied = make_model(public_config("smollm2-135m"))
    assert weight_bytes(tied, Mesh(), 1) == tied.weight_bytes


def test_experts_that_are_read_are_those_that_some_token_chooses():
    router = Router(kind="softmax", num_experts=8, experts_per_token=2)
    assert share_of_experts(router, 1) == 2 / 8
    assert share_of_experts(router, 2) == pytest.approx(1 - (6 / 8) ** 2)
    assert share_of_experts(router, 1000) == pytest.approx(1.0)
    model = make_model(public_config("mixtral-8x7b"))
    experts = 32 * 8 * 3 * 4096 * 14_336 * 2
    read = weight_bytes(model, Mesh(), 2)
    idle = experts * (6 / 8) ** 2
    table = 32_000 * 4096 * 2
    assert read == pytest.approx(model.weight_bytes - idle - table + 2 * 4096 * 2)


def test_token_multiplies_its_experts_only():
    model = make_model(public_config("mixtral-8x7b"))
    attention = 4096 * (32 + 2 * 8) * 128 + 32 * 128 * 4096
    layer = attention + 4096 * 8 + 2 * 3 * 4096 * 14_336
    assert body_flops(model, Mesh()) == 2 * 32 * layer
    # Four chips hold two experts each and compute for each other's tokens.
    assert body_flops(model, Mesh(ep=4)) == 2 * 32 * layer


def test_expert_chips_hit_each_others_experts():
    model = make_model(public_config("mixtral-8x7b"))
    one, four = weight_bytes(model, Mesh(), 8), weight_bytes(model, Mesh(ep=4), 2)
    experts = 32 * 8 * 3 * 4096 * 14_336 * 2
    hit = 1 - (6 / 8) ** 8
    rest = one - experts * hit
    assert four == pytest.approx(rest + experts / 4 * hit - 6 * 4096 * 2)


def test_tensor_parallel_step_sums_twice_a_layer_and_once_for_the_embedding():
    model = make_model(public_config("llama-3-70b"))
    (message,) = messages(model, Mesh(tp=8), tokens=32)
    assert (message.kind, message.count) == ("all_reduce", 2 * 80 + 1)
    assert (message.num_chips, message.num_bytes) == (8, 32 * 8192 * 2)
    assert messages(model, Mesh(dp=8), tokens=32) == ()


def test_parts_that_are_whole_on_every_chip_send_nothing():
    model = make_model(public_config("smollm2-135m"))
    (message,) = messages(model, Mesh(tp=2), tokens=1)
    assert message.count == 30 + 1  # the feed-forwards and the embedding


def test_tokens_travel_to_their_experts_and_back():
    model = make_model(public_config("qwen3-30b-a3b"))
    (message,) = messages(model, Mesh(ep=4), tokens=10)
    assert (message.kind, message.count, message.num_chips) == ("all_to_all", 2 * 48, 4)
    # 8 experts, but at most one message to each of 4 chips
    assert message.num_bytes == 10 * 2048 * 2 * 4
    wide = messages(model, Mesh(ep=4, tp=2), tokens=10)[1]
    assert (wide.num_bytes, wide.span) == (10 * 2048 * 2 * 4 / 2, 8)


def test_latent_queries_travel_to_where_the_sequences_are():
    model = make_model(public_config("deepseek-v3"))
    sums, query, value = messages(model, Mesh(tp=8), tokens=16)
    assert sums.count == 2 * 61 + 1
    assert (query.count, query.num_bytes) == (61, 16 * 16 * 576 * 2)
    assert (value.count, value.num_bytes) == (61, 16 * 16 * 512 * 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_work_is_what_benchmarks_count_for_the_loaded_model(family):
    """`bench latency` counts from real weights and a real cache."""
    loaded = tiny_model(family)
    config = loaded.config
    model = make_model(config)
    for batch, context in [(1, 7), (3, 100)]:
        work = decode_work(model, Mesh(), batch=batch, context=context)
        cache = init_cache(config, num_pages=2, exec=Exec(page_size=4))
        kv_bytes = batch * costs.kv_bytes_per_step(cache, config, context)
        read = costs.weight_bytes_per_step(loaded.params, config, batch=batch)
        assert work.kv_bytes == kv_bytes
        assert work.weight_bytes == pytest.approx(read, abs=len(config.layers) + 2)


def test_data_parallel_groups_share_the_batch(llama):
    apart = decode_work(llama, Mesh(dp=4), batch=10, context=100)
    assert apart == decode_work(llama, Mesh(), batch=3, context=100)
    assert dataclasses.replace(apart, messages=()) == apart
