"""Times of steps on chips, by hand; the project's first sums are here."""

import dataclasses

import pytest

from inferjax.planner import Load, Mesh, chip_named, make_model, measured_chip, public_config
from inferjax.planner.hardware import Measured
from inferjax.planner.search import decode_point
from inferjax.planner.steps import measured_at, message_s, product_rate, step_time, total_time
from inferjax.planner.work import Message, Work

H100 = chip_named("h100")
ONE = Mesh()
IDLE = Work(weight_bytes=0.0, kv_bytes=0.0, product_flops=0.0, attention_flops=0.0)


@pytest.fixture(scope="module")
def llama():
    return make_model(public_config("llama-3-70b"))


def point(model, mesh=ONE):
    return decode_point(model, H100, mesh, Load(batch=1, context=1), 1)


def test_140_gb_at_3_35_tb_a_second_are_42_ms_a_token(llama):
    work = dataclasses.replace(IDLE, weight_bytes=140e9)
    assert step_time(H100, llama, work, rows=1).seconds == pytest.approx(0.0418, abs=5e-5)
    found = point(llama)
    # 2.1 of the 141.1 GB are an embedding, of which one row is read.
    assert llama.weight_bytes == pytest.approx(141.1e9, rel=1e-3)
    assert found.step.seconds == pytest.approx((141.1e9 - 2.1e9) / 3.35e12, rel=1e-3)
    assert found.tok_s == pytest.approx(24, rel=0.01)
    assert found.step.binds == "weights"


def test_half_the_bytes_are_twice_the_speed(llama):
    half = make_model(llama.config, quantize="int8")
    assert point(half).tok_s / point(llama).tok_s == pytest.approx(2, rel=0.01)


def test_longer_of_memory_and_arithmetic_counts(llama):
    work = Work(weight_bytes=3.35e9, kv_bytes=6.7e9, product_flops=989.4e9, attention_flops=0.0)
    step = step_time(H100, llama, work, rows=1)
    assert (step.weights_s, step.kv_s, step.compute_s) == pytest.approx((1e-3, 2e-3, 1e-3))
    assert (step.seconds, step.binds) == (pytest.approx(3e-3), "kv")
    busy = dataclasses.replace(work, attention_flops=9 * 989.4e9)
    step = step_time(H100, llama, busy, rows=1)
    assert (step.seconds, step.binds) == (pytest.approx(10e-3), "compute")


def test_messages_come_on_top(llama):
    message = Message(kind="all_reduce", count=161, num_chips=8, span=8, num_bytes=8192 * 2)
    work = dataclasses.replace(IDLE, weight_bytes=3.35e6, messages=(message,))
    step = step_time(H100, llama, work, rows=1)
    each = 6.6e-6 + 2 * 0.6e-6 + 2 * 7 / 8 * 8192 * 2 / 450e9
    assert step.link_s == pytest.approx(161 * each)
    assert step.seconds == pytest.approx(1e-6 + 161 * each)
    assert step.binds == "links"


@pytest.mark.parametrize(
    ("chip", "kind", "num_chips", "seconds"),
    [
        # two hops through the switch; 2 (n - 1) / n of the bytes
        ("h100", "all_reduce", 4, 6.6e-6 + 2 * 0.6e-6 + 1.5 * 9e6 / 450e9),
        ("h100", "all_to_all", 4, 6.6e-6 + 0.6e-6 + 0.75 * 9e6 / 450e9),
        # round the host: 2 (n - 1) hops
        ("l4", "all_reduce", 4, 6.6e-6 + 6 * 1e-6 + 1.5 * 9e6 / 32e9),
        # both ways round an axis: n hops of a microsecond, 2 x 45 GB/s
        ("tpu-v5e", "all_reduce", 8, 8e-6 + 1.75 * 9e6 / 90e9),
        ("tpu-v5e", "all_to_all", 8, 4e-6 + 2 * 9e6 / 90e9),
        # beyond eight GPUs the network is the slowest part
        ("h100", "all_reduce", 16, 6.6e-6 + 30 * 2.7e-6 + 2 * 15 / 16 * 9e6 / 50e9),
    ],
)
def test_time_of_a_message(chip, kind, num_chips, seconds):
    message = Message(kind=kind, count=1, num_chips=num_chips, span=num_chips, num_bytes=9e6)
    assert message_s(chip_named(chip), message) == pytest.approx(seconds)


def test_message_between_distant_chips_takes_the_network():
    near = Message(kind="all_to_all", count=1, num_chips=2, span=2, num_bytes=9e6)
    far = dataclasses.replace(near, span=16)
    assert message_s(H100, far) == pytest.approx(6.6e-6 + 2.7e-6 + 0.5 * 9e6 / 50e9)
    assert message_s(H100, near) < message_s(H100, far)


@pytest.mark.parametrize(
    ("quantize", "dtype", "rate"),
    [
        (None, "bfloat16", 989.4e12),
        (None, "float32", 494.7e12),
        # Packed weights are widened to float32, and multiplied so, whatever was rounded before.
        ("int4", "bfloat16", 494.7e12),
        ("fp8", "bfloat16", 494.7e12),
        ("int8", "bfloat16", 494.7e12),
        ("int8-w8a8", "bfloat16", 494.7e12),
        ("bfloat16", "bfloat16", 494.7e12),
        ("float32", "bfloat16", 494.7e12),
    ],
)
def test_rate_of_products_follows_what_is_multiplied(quantize, dtype, rate):
    model = make_model(public_config("llama-3-8b"), dtype=dtype, quantize=quantize)
    assert product_rate(H100, model) == rate


def test_measured_steps_add_up_and_are_interpolated_by_time(llama):
    low = Measured(rows=1, product_bytes_s=30e9, kv_bytes_s=20e9, step_s=1e-3)
    high = Measured(rows=31, product_bytes_s=10e9, kv_bytes_s=20e9, step_s=4e-3)
    chip = measured_chip(memory_bytes=24e9, bandwidth=40e9, flops=1e11, measured=(high, low))
    work = dataclasses.replace(IDLE, weight_bytes=3e9, kv_bytes=2e9, product_flops=1e13)
    step = step_time(chip, llama, work, rows=1)
    assert (step.weights_s, step.kv_s, step.fixed_s) == pytest.approx((0.1, 0.1, 1e-3))
    assert step.seconds == pytest.approx(0.201)
    # Half way: 1/30 and 1/10 of a nanosecond a byte, 1/15 between.
    middle = measured_at(chip, 16)
    assert middle.product_bytes_s == pytest.approx(15e9)
    assert middle.step_s == pytest.approx(2.5e-3)
    # Beyond what was measured, products take the longer of memory's and arithmetic's time.
    assert step_time(chip, llama, work, rows=512).weights_s == pytest.approx(100.0)
    assert measured_at(chip, 512).step_s == 4e-3


def test_steps_one_after_the_other_are_bound_by_what_binds_most_of_them(llama):
    memory = dataclasses.replace(IDLE, weight_bytes=3.35e9)
    busy = dataclasses.replace(IDLE, product_flops=3 * 989.4e9)
    steps = [step_time(H100, llama, work, rows=1) for work in (memory, busy, memory)]
    total = total_time(steps)
    assert total.seconds == pytest.approx(5e-3)
    assert (total.weights_s, total.compute_s) == pytest.approx((2e-3, 3e-3))
    assert total.binds == "compute"


def test_sharing_weights_shortens_the_step_by_less_than_the_chips(llama):
    alone, shared = point(llama), point(llama, mesh=Mesh(tp=8))
    assert 4 < alone.step.seconds / shared.step.seconds < 8
    expected = shared.step.weights_s + shared.step.kv_s + shared.step.link_s
    assert shared.step.seconds == pytest.approx(expected)
