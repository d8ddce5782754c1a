"""What fits a chip, by hand, and what is said where something does not."""

import pytest

from inferjax.errors import DoesNotFit
from inferjax.planner import Mesh, chip_named, make_model, public_config
from inferjax.planner.fit import Sizes, check_fits, room_on, workspace_bytes

H100 = chip_named("h100")
TOKEN = 2 * 8 * 128 * 80 * 2  # Llama-3-70B


@pytest.fixture(scope="module")
def llama():
    return make_model(public_config("llama-3-70b"))


def test_workspace_is_activations_and_logits(llama):
    sizes = Sizes(batch=16, context=4096, chunk=1000)
    inner = (8 + 2) * 128 + 2 * 28_672 // 8
    rows = 1000 * (3 * 8192 + inner) * 2
    assert workspace_bytes(llama, Mesh(tp=8), sizes) == rows + 2 * 16 * 128_256 // 8 * 4
    # Eight groups of two sequences each, with whole weights.
    inner = (64 + 2 * 8) * 128 + 2 * 28_672
    rows = 1000 * (3 * 8192 + inner) * 2
    assert workspace_bytes(llama, Mesh(dp=8), sizes) == rows + 2 * 2 * 128_256 * 4


def test_workspace_holds_the_batch_where_it_is_larger_than_a_chunk(llama):
    small, large = (Sizes(batch=b, context=64, chunk=10) for b in (10, 20))
    logits = 2 * 128_256 * 4
    row = (3 * 8192 + (64 + 2 * 8) * 128 + 2 * 28_672) * 2
    grown = workspace_bytes(llama, Mesh(), large) - workspace_bytes(llama, Mesh(), small)
    assert grown == 10 * (row + logits)


def test_workspace_of_a_latent_holds_queries_as_wide_as_it():
    model = make_model(public_config("deepseek-v3"))
    found = workspace_bytes(model, Mesh(), Sizes(batch=1, context=64, chunk=1))
    # Eight experts of a token, each with a row of the model's width.
    inner = 128 * (512 + 64) + 8 * (7168 + 2 * 2048)
    assert found == (3 * 7168 + inner) * 2 + 2 * 129_280 * 4


def test_users_are_what_is_left_divided_by_one_of_them(llama):
    sizes = Sizes(batch=32, context=4096)
    room = room_on(H100, llama, Mesh(tp=8), sizes)
    left = 80e9 - 8e9 - room.weight_bytes - room.workspace_bytes
    assert room.cache_bytes == left
    assert room.sequence_bytes == 4096 * TOKEN / 8
    assert room.users == int(left // (4096 * TOKEN / 8)) == 323


def test_groups_have_users_of_their_own(llama):
    model = make_model(public_config("llama-3-8b"))
    sizes = Sizes(batch=1, context=4096)
    alone = room_on(H100, model, Mesh(), sizes).users
    assert room_on(H100, model, Mesh(dp=4), sizes).users == 4 * alone


def test_shared_prefix_is_held_once(llama):
    sizes = Sizes(batch=32, context=4096, shared_prefix=1000)
    room = room_on(H100, llama, Mesh(tp=8), sizes)
    pages = 1000 // 64 * 64  # whole pages can be shared
    assert room.sequence_bytes == (4096 - pages) * TOKEN / 8
    left = room.cache_bytes - pages * TOKEN / 8
    assert room.users == int(left // room.sequence_bytes) > 323


def test_what_is_missing_includes_the_shared_prefix(llama):
    with pytest.raises(DoesNotFit) as raised:
        check_fits(H100, llama, Mesh(tp=8), Sizes(batch=2000, context=4096, shared_prefix=1024))
    cached = (1024 + 2000 * 3072) * TOKEN / 8
    assert raised.value.missing_bytes == pytest.approx(cached - raised.value.room.cache_bytes)


def test_users_of_a_window_do_not_share_it():
    model = make_model(public_config("gpt-oss-20b"))
    room = room_on(H100, model, Mesh(), Sizes(batch=1, context=4096, shared_prefix=2048))
    token = 2 * 8 * 64 * 2
    assert room.sequence_bytes == token * (12 * 2048 + 12 * 3 * 64)


def test_int8_cache_holds_almost_twice_the_users(llama):
    narrow = make_model(llama.config, kv_dtype="int8")
    sizes = Sizes(batch=32, context=4096)
    ratio = (
        room_on(H100, narrow, Mesh(tp=8), sizes).users
        / room_on(H100, llama, Mesh(tp=8), sizes).users
    )
    assert ratio == pytest.approx(2 * 256 / (256 + 4), rel=0.01)


def test_model_that_does_not_fit_says_by_how_much_and_what_would(llama):
    sizes = Sizes(batch=1, context=4096)
    with pytest.raises(DoesNotFit) as raised:
        check_fits(H100, llama, Mesh(), sizes)
    error = raised.value
    room = error.room
    needed = 8e9 + room.weight_bytes + room.workspace_bytes + 4096 * TOKEN
    assert error.missing_bytes == pytest.approx(needed - 80e9)
    assert f"{(needed - 80e9) / 1e9:.1f} GB are missing on every chip" in error.what
    assert "weights take 141.1" in error.why
    assert "quantize the weights to int4-g128" in error.fix  # int8 is 70.6 GB, and 72 are there
    # Two hold 70.6 GB each, of 72 that are there.
    assert "use 2 chips (tp 2)" in error.fix


def test_too_many_users_are_told_how_many_fit(llama):
    with pytest.raises(DoesNotFit) as raised:
        check_fits(H100, llama, Mesh(tp=8), Sizes(batch=400, context=4096))
    # One less than with a batch of 32: so many users' logits take room too.
    assert "serve 322 users at a time" in raised.value.fix
    assert "keep keys and values in int8" in raised.value.fix
    assert "use 16 chips" in raised.value.fix


def test_packed_weights_are_offered_with_the_cache_that_they_fit_with(llama):
    def said(batch, context=4096):
        with pytest.raises(DoesNotFit) as raised:
            check_fits(H100, llama, Mesh(tp=8), Sizes(batch=batch, context=context))
        return raised.value.fix

    # Float32 keys and values, which packed weights have by default, would take twice the room.
    assert "quantize the weights to int4-g128 with keys and values in bfloat16" in said(380)
    # 13.1 GB less would do for the 13.0 that are missing, but activations in float32 take more.
    assert "quantize" not in said(407, context=4032)
    sizes = Sizes(batch=380, context=4096)
    narrow = make_model(llama.config, quantize="int4-g128", kv_dtype="bfloat16")
    assert room_on(H100, narrow, Mesh(tp=8), sizes).users >= 380
    narrow = make_model(llama.config, quantize="int4-g128")
    assert room_on(H100, narrow, Mesh(tp=8), sizes).users < 380


def test_nothing_is_offered_that_would_not_do():
    model = make_model(public_config("deepseek-v3"), quantize="int4-g128", kv_dtype="int8")
    with pytest.raises(DoesNotFit) as raised:
        check_fits(chip_named("l4"), model, Mesh(), Sizes(batch=1, context=4096))
    assert raised.value.fix.startswith("use 32 chips")
