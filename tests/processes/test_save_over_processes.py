"""Several processes save one checkpoint, which any mesh and one process restore."""

import jax
import numpy as np
import pytest
from launched import ROOT, launch
from tiny_models import TINY, tiny_model

import inferjax as ij

PROGRAM = str(ROOT / "tests" / "processes" / "save_program.py")


@pytest.mark.parametrize(
    ("count", "scheme"),
    [
        (2, "int8"),
        pytest.param(2, "none", marks=pytest.mark.slow),
        pytest.param(4, "int8", marks=pytest.mark.slow),
    ],
)
def test_what_processes_save_is_restored_anywhere(count, scheme, tmp_path):
    path = ij.save(tiny_model("gpt2"), tmp_path / "saved")
    code, out, err = launch("-n", str(count), "--", PROGRAM, str(path), scheme, "whole")
    assert code == 0, err
    for rank in range(count):
        assert f"[{rank}] restored in {rank}" in out
        assert f"[{rank}] format='safetensors' from {count} processes" in out
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]
    want = ij.load(TINY / "llama", quantize=None if scheme == "none" else scheme).params
    got = ij.load(path).params
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_process_that_is_killed_while_it_saves_leaves_the_previous_checkpoint(tmp_path):
    path = ij.save(tiny_model("gpt2"), tmp_path / "saved")
    code, _, err = launch("-n", "2", "--", PROGRAM, str(path), "none", "killed")
    assert code == 2
    assert "rank 1 of 2 was killed by signal 9" in err
    again = ij.load(path)
    assert again.family == "gpt2"
    jax.tree.map(np.testing.assert_array_equal, again.params, tiny_model("gpt2").params)
    ij.save(tiny_model("llama"), path, overwrite=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


def test_a_process_that_cannot_save_fails_the_save_of_all_and_none_waits(tmp_path):
    path = ij.save(tiny_model("gpt2"), tmp_path / "saved")
    code, out, err = launch("-n", "2", "--", PROGRAM, str(path), "none", "full")
    assert code == 0, err
    assert "refused in 0 [Errno 28] no room" in out
    assert "refused in 1 another process could not do its part" in out
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]
    assert ij.load(path).family == "gpt2"
