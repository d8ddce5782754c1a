"""Rules that would be ignored are refused, and they know every axis that a weight has."""

import jax
import pytest
from tiny_models import FAMILIES, tiny_model

import inferjax as ij
from inferjax.errors import UnsupportedConfig
from inferjax.models.params import ArraySpec, param_spec
from inferjax.rules import LOGICAL_AXES, _check_kinds


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ((("vocabb", "model"), ("ffn", "model")), "'vocabb'"),
        ((("vocab",),), "axes has"),
        (("vocab", "model"), "axes has 'vocab'"),
        ((("vocab", None),), "axes has"),
        ([("vocab", "model")], "axes has"),
        ((("ffn", "x"), ("ffn", "y")), "more than one rule for 'ffn'"),
    ],
)
def test_rules_that_would_be_ignored_are_refused(axes, text):
    with pytest.raises(UnsupportedConfig, match=text):
        _check_kinds(("data",), axes)


@pytest.mark.parametrize("rows", ["data", ["data"], (1,), None])
def test_rows_are_a_tuple_of_names(rows):
    with pytest.raises(UnsupportedConfig, match="rows="):
        _check_kinds(rows, ())


def test_rules_are_checked_where_they_are_made():
    with pytest.raises(UnsupportedConfig, match="'vocabb'"):
        ij.Rules(axes=(("vocabb", "model"),))


def test_every_axis_of_every_family_can_have_a_rule():
    specs = [
        spec
        for name in FAMILIES
        for spec in jax.tree.leaves(
            param_spec(tiny_model(name).config), is_leaf=lambda node: isinstance(node, ArraySpec)
        )
    ]
    assert {name for spec in specs for name in spec.axes if name} == set(LOGICAL_AXES)
