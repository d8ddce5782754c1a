"""Codes in the layout that holds several formats at once: not a bit is lost."""

import itertools

import numpy as np
import pytest

from inferjax.checkpoint.stored_codes import CodeLayout, StoredCodes, narrowest

RANGES = {("int4", False): (-8, 7), ("int4", True): (0, 15), ("int8", False): (-128, 127)}
LAYOUTS = [
    CodeLayout(format="int4", group=32, scale_dtype="float16"),
    CodeLayout(format="int4", group=32, minimum=True, scale_dtype="float16"),
    CodeLayout(format="int4", group=16),
    CodeLayout(format="int4", group=16, minimum=True),
    CodeLayout(format="int4", group=32, minimum=True),
    CodeLayout(format="int8", group=32, scale_dtype="float16"),
    CodeLayout(format="int8", group=32, minimum=True, scale_dtype="float16"),
    CodeLayout(format="int8", group=16),
    CodeLayout(format="int8", group=0),
    CodeLayout(format="int4", group=0, minimum=True),
]


def make_codes(layout, rows=3, num_in=72, seed=0):
    """Return random rows; the last group of 32 is not full."""
    rng = np.random.default_rng(seed)
    low, high = RANGES.get((layout.format, layout.minimum), (-128, 127))
    groups = -(-num_in // layout.group) if layout.group else 1
    shared = rng.normal(size=(2, rows, groups)).astype(np.float16).astype(layout.scale_dtype)
    codes = rng.integers(low, high + 1, (rows, num_in)).astype(np.int8)
    return StoredCodes(
        layout=layout,
        codes=codes,
        scales=shared[0],
        minimums=shared[1] if layout.minimum else None,
    )


def test_a_value_is_code_times_scale_plus_minimum():
    layout = CodeLayout(format="int4", group=2, minimum=True)
    stored = StoredCodes(
        layout=layout,
        codes=np.array([[1, 2, 3]], np.int8),
        scales=np.array([[2.0, 10.0]], np.float32),
        minimums=np.array([[0.5, -1.0]], np.float32),
    )
    np.testing.assert_array_equal(stored.values(), [[2.5, 4.5, 29.0]])


@pytest.mark.parametrize(("first", "second"), [*itertools.product(LAYOUTS, LAYOUTS)])
def test_two_layouts_fit_one_without_a_change(first, second):
    wide = narrowest([first, second])
    assert wide is not None
    assert wide == narrowest([second, first])
    assert wide.bits_per_weight >= max(first.bits_per_weight, second.bits_per_weight)
    low, high = RANGES.get((wide.format, wide.minimum), (-128, 127))
    for layout in (first, second):
        stored = make_codes(layout)
        widened = stored.widened(wide)
        np.testing.assert_array_equal(widened.values(), stored.values())
        assert widened.codes.min() >= low
        assert widened.codes.max() <= high
        assert widened.scales.dtype == wide.scale_dtype
        assert (widened.minimums is not None) == wide.minimum


def test_the_narrowest_is_no_wider_than_needed():
    four, eight = LAYOUTS[1], LAYOUTS[5]
    assert narrowest([four, four]) == four
    assert narrowest([four, eight]) == LAYOUTS[6]
    assert [layout.bits_per_weight for layout in LAYOUTS[:6]] == [4.5, 5.0, 6.0, 8.0, 6.0, 8.5]


def test_groups_without_a_common_part_have_no_layout():
    odd = CodeLayout(format="int4", group=36)
    assert narrowest([LAYOUTS[0], odd]) is None


def test_a_scale_of_the_largest_float16_is_widened_exactly():
    """-8 times it is beyond float16."""
    four = LAYOUTS[0]
    stored = StoredCodes(
        layout=four,
        codes=np.full((1, 32), -8, np.int8),
        scales=np.full((1, 1), 65504, np.float16),
    )
    wide = narrowest([four, LAYOUTS[1]])
    assert wide is not None
    np.testing.assert_array_equal(stored.widened(wide).values(), stored.values())
