"""Whole plans: the best mesh and batch, the first token, costs, and what more would save."""

import dataclasses
import math

import pytest

from inferjax.errors import (
    DoesNotFit,
    InvalidInput,
    ShardingError,
    UnknownChip,
    UnsupportedConfig,
    UnsupportedModel,
)
from inferjax.planner import (
    CHIPS,
    Drafts,
    Load,
    Mesh,
    chip_named,
    make_model,
    make_plan,
    public_config,
)
from inferjax.planner.fit import room_on
from inferjax.planner.mesh import meshes
from inferjax.planner.plan import prefill_time
from inferjax.planner.price import dollars_per_million, joules_per_token
from inferjax.planner.savings import expected_tokens, speculation
from inferjax.planner.search import decode_point, fewest_chips
from inferjax.planner.waiting import queue_s

H100 = chip_named("h100")
LOAD = Load(batch=32, context=4096)


@pytest.fixture(scope="module")
def llama():
    return make_model(public_config("llama-3-70b"))


@pytest.fixture(scope="module")
def plan(llama):
    return make_plan(llama, H100, 8, LOAD, price_per_chip_hour=2.0)


def test_plan_takes_the_fastest_mesh_that_fits(llama, plan):
    times = {
        m: decode_point(llama, H100, m, LOAD, 32).step.seconds for m in meshes(llama.config, 8)
    }
    assert plan.mesh == min(times, key=lambda mesh: times[mesh]) == Mesh(tp=8)
    assert plan.decode.step.seconds == times[plan.mesh]
    assert plan.decode.tok_s == pytest.approx(32 / times[plan.mesh])
    assert plan.decode.user_tok_s == pytest.approx(1 / times[plan.mesh])


def test_plan_stays_on_the_mesh_that_is_asked_for(llama):
    found = make_plan(llama, H100, 8, LOAD, mesh=Mesh(tp=4, dp=2))
    assert found.mesh == Mesh(tp=4, dp=2)
    with pytest.raises(ShardingError):
        make_plan(llama, H100, 8, LOAD, mesh=Mesh(tp=4))


def test_latency_target_gives_the_most_tokens_within_it():
    model, chip = make_model(public_config("smollm2-1.7b")), chip_named("l4")
    load = Load(context=2048)
    found = make_plan(model, chip, 4, load, max_step_s=0.025)
    # Nothing else within the time has more: every mesh at every batch, by brute force.
    best = {
        point.tok_s: (mesh, batch)
        for mesh in meshes(model.config, 4)
        for batch in range(mesh.num_groups, 80, mesh.num_groups)
        if (point := decode_point(model, chip, mesh, load, batch)).step.seconds <= 0.025
        and room_on(chip, model, mesh, dataclasses.replace(load, batch=batch).sizes).users >= batch
    }
    assert found.decode.step.seconds <= 0.025
    assert (found.mesh, found.load.batch) == best[max(best)]
    assert found.decode.tok_s == max(best)
    assert 1 < found.load.batch < 76


def test_latency_target_that_nobody_meets_says_how_fast_one_user_is(llama):
    with pytest.raises(InvalidInput, match=r"one user alone waits 6\.\d\d ms for a token \(tp 8\)"):
        make_plan(llama, H100, 8, LOAD, max_step_s=0.001)


def test_model_that_no_mesh_holds_names_the_one_that_comes_closest():
    model = make_model(public_config("deepseek-v3"))
    with pytest.raises(DoesNotFit, match="GB are missing") as raised:
        make_plan(model, H100, 8, LOAD)
    rooms = [room_on(H100, model, mesh, LOAD.sizes) for mesh in meshes(model.config, 8)]
    assert raised.value.room.cache_bytes == max(room.cache_bytes for room in rooms) < 0


def test_first_token_waits_for_network_turn_and_prompt(llama):
    load = dataclasses.replace(LOAD, network_s=0.02, arrivals_s=3.0)
    found = make_plan(llama, H100, 8, load).first_token
    prefill = prefill_time(llama, H100, Mesh(tp=8), load, 0).seconds
    step = decode_point(llama, H100, Mesh(tp=8), load, 32).step.seconds
    rho = 3.0 * prefill
    assert found.network_s == 0.02
    assert found.prefill_s == prefill
    assert found.queue_s == pytest.approx(step / 2 + rho * prefill / (2 * (1 - rho)))
    assert found.seconds == pytest.approx(0.02 + found.queue_s + prefill)
    assert found.prefill_binds == "compute"


def test_prefill_by_hand(llama):
    load = Load(batch=1, context=2048, chunk=2048)
    step = prefill_time(llama, H100, Mesh(), load, 0)
    layer = 8192 * (64 + 16) * 128 + 8192 * 8192 + 3 * 8192 * 28_672
    flops = 2 * 80 * layer * 2048 + 2 * 128_256 * 8192
    flops += 2048 * 2049 / 2 * 80 * 4 * 64 * 128
    assert step.seconds == pytest.approx(flops / 989.4e12)
    chunked = prefill_time(llama, H100, Mesh(), dataclasses.replace(load, chunk=512), 0)
    assert chunked.seconds == pytest.approx(step.seconds)
    # Four chunks read the weights four times, less three heads that are not needed.
    assert chunked.weights_s == pytest.approx(4 * step.weights_s, rel=0.01)


def test_queue_by_hand():
    # A load of one half: half a prefill on average before one's own.
    waits = queue_s(step_s=0.01, prefill_s=0.1, arrivals_s=5.0, num_groups=1)
    assert waits == pytest.approx(0.005 + 0.5 * 0.1 / (2 * 0.5))
    apart = queue_s(step_s=0.01, prefill_s=0.1, arrivals_s=10.0, num_groups=2)
    assert apart == pytest.approx(waits)
    with pytest.raises(InvalidInput, match=r"at most 10\.00 requests a second"):
        queue_s(step_s=0.01, prefill_s=0.1, arrivals_s=10.0, num_groups=1)


def test_costs_by_hand(plan):
    assert dollars_per_million(3.6, 10, 1000) == pytest.approx(10.0)  # 0.01 $/s, 1000 s
    assert joules_per_token(700, 8, 1000) == 5.6
    tok_s = plan.decode.tok_s
    assert plan.cost.output_dollars_per_million == pytest.approx(2 * 8 / 3600 / tok_s * 1e6)
    input_tok_s = 4096 / plan.first_token.prefill_s
    assert plan.cost.input_dollars_per_million == pytest.approx(2 * 8 / 3600 / input_tok_s * 1e6)
    assert plan.cost.joules_per_output_token == pytest.approx(700 * 8 / tok_s)


def test_costs_that_nobody_knows_are_none(llama):
    tpu = make_plan(llama, chip_named("tpu-v5p"), 8, LOAD).cost
    assert tpu.output_dollars_per_million is None
    assert tpu.joules_per_output_token is None
    given = make_plan(llama, chip_named("tpu-v5p"), 8, LOAD, watts=400.0)
    assert given.cost.joules_per_output_token == pytest.approx(400 * 8 / given.decode.tok_s)


def test_drafts_yield_a_geometric_sum():
    assert expected_tokens(0.8, 4) == pytest.approx(1 + 0.8 + 0.8**2 + 0.8**3 + 0.8**4)
    assert expected_tokens(1.0, 4) == 5
    assert expected_tokens(0.0, 4) == 1
    for accept, length in [(1.1, 4), (-0.1, 4), (0.5, -1)]:
        with pytest.raises(InvalidInput):
            expected_tokens(accept, length)


def test_speedup_of_drafts_is_the_papers_where_verifying_is_a_plain_step():
    # Leviathan et al., theorem 3.8: (1 - a^(n+1)) / ((1 - a) (n c + 1))
    found = speculation(accept=0.8, draft_len=5, plain_s=0.01, verify_s=0.01, draft_s=0.0005)
    assert found.speedup == pytest.approx((1 - 0.8**6) / ((1 - 0.8) * (5 * 0.05 + 1)))


def test_drafts_help_less_where_arithmetic_is_the_limit(llama):
    drafts = Drafts(accept=0.8, draft_len=4, share=0.05)
    few = make_plan(llama, H100, 8, dataclasses.replace(LOAD, batch=1), drafts=drafts).speculation
    many = make_plan(llama, H100, 8, Load(batch=512, context=256), drafts=drafts).speculation
    assert few is not None
    assert many is not None
    assert few.tokens_per_step == many.tokens_per_step == pytest.approx(expected_tokens(0.8, 4))
    assert few.step_s > 0
    assert 2 < few.speedup < 3
    assert many.speedup < 1.5


def test_shared_prefix_saves_its_prefill_and_its_pages(llama, plan):
    load = dataclasses.replace(LOAD, shared_prefix=1024)
    found = make_plan(llama, H100, 8, load)
    saved = found.prefix
    assert saved is not None
    assert saved.prefill_s == found.first_token.prefill_s
    assert saved.saved_s == pytest.approx(plan.first_token.prefill_s - saved.prefill_s)
    # A quarter of the tokens, whose attention is a little cheaper than that of later ones.
    assert saved.saved_s == pytest.approx(plan.first_token.prefill_s / 4, rel=0.1)
    assert (saved.users_without, saved.users) == (plan.room.users, found.room.users)
    assert saved.users > saved.users_without


def test_curve_rises_to_the_users_that_fit(plan):
    batches = [point.batch for point in plan.curve]
    assert batches == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert plan.room.users == 323
    rates = [point.tok_s for point in plan.curve]
    assert rates == sorted(rates)
    times = [point.step.seconds for point in plan.curve]
    assert times == sorted(times)


def test_fewest_chips_hold_the_load(llama):
    mesh = fewest_chips(llama, H100, Load(batch=1, context=4096))
    assert mesh == Mesh(tp=2)
    assert fewest_chips(make_model(public_config("llama-3-8b")), H100, LOAD) == Mesh()


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch": 0},
        {"context": 0},
        {"prompt": 0},
        {"chunk": 0},
        {"page_size": 0},
        {"shared_prefix": 4096},
        {"shared_prefix": -1},
        {"prompt": 8000, "shared_prefix": 4096},
        {"prompt": 8000, "shared_prefix": 5000},
        {"prompt": 100, "shared_prefix": 100},
        {"reserved_share": 1.0},
        {"arrivals_s": -1.0},
        {"network_s": -0.1},
        {"arrivals_s": math.nan},
        {"network_s": math.inf},
        {"context": 8192, "chunk": 1},
    ],
    ids=str,
)
def test_load_that_means_nothing_is_refused(wrong):
    with pytest.raises(InvalidInput) as raised:
        Load(**wrong)
    assert raised.value.why
    assert raised.value.fix


def test_longest_prefix_leaves_a_token_to_every_sequence(llama):
    with pytest.raises(InvalidInput, match="give at most 4095"):
        Load(prompt=8000, shared_prefix=4096)
    load = Load(batch=2, prompt=8000, context=4096, shared_prefix=4095)
    found = make_plan(llama, H100, 8, load)
    assert found.room.sequence_bytes > 0
    assert found.room.users >= 2


@pytest.mark.parametrize(
    ("num_chips", "load", "settings"),
    [
        (0, LOAD, {}),
        (8, Load(context=8193), {}),
        (8, Load(context=100, prompt=9000), {}),
        (8, LOAD, {"max_step_s": 0.0}),
        (8, LOAD, {"price_per_chip_hour": -1.0}),
        (8, LOAD, {"watts": -1.0}),
        (8, LOAD, {"drafts": Drafts(accept=2.0)}),
        (8, LOAD, {"drafts": Drafts(accept=0.5, draft_len=-3)}),
        (8, LOAD, {"drafts": Drafts(accept=0.5, share=-1.0)}),
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(llama, num_chips, load, settings):
    with pytest.raises(InvalidInput):
        make_plan(llama, H100, num_chips, load, **settings)


@pytest.mark.parametrize(
    "settings", [{"dtype": "int8"}, {"kv_dtype": "int3"}, {"quantize": "int3"}], ids=str
)
def test_storage_that_does_not_exist_is_refused(settings):
    with pytest.raises(UnsupportedConfig):
        make_model(public_config("llama-3-8b"), **settings)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(UnknownChip) as raised:
        chip_named("h1000")
    assert all(name in raised.value.fix for name in CHIPS)
    with pytest.raises(UnsupportedModel, match="llama-3-70b"):
        public_config("llama-7")


def test_fp8_is_short_for_its_dtype(llama):
    assert make_model(llama.config, kv_dtype="fp8").kv_dtype == "float8_e4m3fn"
