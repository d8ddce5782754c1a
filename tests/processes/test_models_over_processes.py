"""A mesh that spans real processes gives what one process gives."""

import json

import numpy as np
import pytest
import tolerances
from launched import ROOT, launch
from models_program import results
from tiny_models import TINY

import inferjax as ij

slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("folder", "count", "data", "scheme", "parts"),
    [
        ("llama", 2, 1, "none", "functions"),
        pytest.param("llama", 2, 1, "none", "all", marks=slow),
        pytest.param("llama", 2, 1, "int8", "all", marks=slow),
        pytest.param("llama", 2, 2, "none", "all", marks=slow),
        pytest.param("mixtral", 4, 1, "none", "all", marks=slow),
        pytest.param("qwen3", 4, 2, "none", "all", marks=slow),
        pytest.param("deepseek_v3", 4, 1, "none", "all", marks=slow),
    ],
)
def test_processes_agree_with_one(folder, count, data, scheme, parts, tmp_path):
    program = str(ROOT / "tests" / "processes" / "models_program.py")
    cache, target = str(ROOT / ".pytest_cache" / "compiled"), tmp_path / "found.json"
    words = (str(TINY / folder), scheme, str(data), parts, cache, str(target))
    code, out, err = launch("-n", str(count), "--", program, *words)
    assert code == 0, err
    found = json.loads(target.read_text())
    ranks = [line.partition("{")[2] for line in out.splitlines() if "ran in" in line]
    assert len(ranks) == count
    assert len(set(ranks)) == 1
    alone = results(ij.load(TINY / folder, quantize=None if scheme == "none" else scheme), parts)
    assert set(found) == set(alone)
    for name in set(found) - {"scores"}:
        assert found[name] == alone[name], name
    np.testing.assert_allclose(found["scores"], alone["scores"], **tolerances.TINY_LOGPROBS_F32)
