import json
import re
import shutil

import pytest

import inferjax as ij
from inferjax.cli import main as cli
from inferjax.planner import CHIPS, Load, Mesh, chip_named, make_model, make_plan, public_config
from inferjax.planner.public_models import HUB_IDS

pytestmark = pytest.mark.usefixtures("cache")

LLAMA = ("llama-3-70b", "--chip=h100", "--chips=8", "--batch=32", "--context=4096")


def plan(capsys, *words):
    assert cli.main(["plan", *words]) == 0
    return capsys.readouterr().out


def plan_json(capsys, *words):
    return json.loads(plan(capsys, *words, "--json"))


def refused(capsys, *words):
    assert cli.main(["plan", *words]) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    return err


def test_plan_prints_what_the_functions_return(capsys):
    model = make_model(public_config("llama-3-70b"))
    expected = make_plan(model, chip_named("h100"), 8, Load(batch=32, context=4096))
    found = plan_json(capsys, *LLAMA)
    assert found["mesh"] == {"tp": 8, "dp": 1, "ep": 1}
    assert found["decode"]["step"]["seconds"] == expected.decode.step.seconds
    assert found["room"]["users"] == expected.room.users
    assert found["room"]["cache_bytes"] == expected.room.cache_bytes
    assert found["first_token"]["seconds"] == expected.first_token.seconds
    assert len(found["curve"]) == len(expected.curve)
    assert found["model"]["kv_bytes_per_token"] == 320 * 1024


def test_plan_is_a_table_for_people(capsys):
    out = plan(capsys, *LLAMA, "--price-per-chip-hour=2", "--shared-prefix=512")
    out += plan(capsys, *LLAMA, "--draft-accept=0.8", "--draft-len=3")
    assert "llama-3-70b on 8 x h100, tp 8" in out
    assert "70.55 billion parameters; bfloat16 weights, 16.00 bits each" in out
    assert re.search(r"weights +17\.64 GB of 141\.11 GB in all", out)
    assert re.search(r"keys and values +327,680 bytes a token", out)
    assert "1.34 GB read for a token" in out
    assert re.search(r"time per token +8\.37 ms, set by reading the weights", out)
    for term in ("network", "queue", "prefill", "time to first token"):
        assert re.search(rf"^  {term} +[\d.]+ ms", out, re.M)
    assert re.search(r"million output tokens +\$\d", out)
    assert re.search(r"energy of an output token +[\d.]+ J", out)
    assert re.search(r"512 shared tokens +[\d.]+ ms of each prefill; \d+ users fit", out)
    assert re.search(r"3 drafted tokens +2\.95 tokens a step", out)
    assert re.search(r"^ +32 +8\.37 +119\.4 +3,821\.3  weights$", out, re.M)


def test_plan_without_a_model_lists_chips_and_models(capsys):
    out = plan(capsys)
    assert all(re.search(rf"^{name} ", out, re.M) for name in CHIPS)
    assert all(name in out for name in HUB_IDS)


def test_fewer_bits_take_fewer_bytes(capsys):
    wide = plan_json(capsys, "llama-3-8b")
    narrow = plan_json(capsys, "llama-3-8b", "--quantize=int4-g128", "--kv=int8")
    assert (wide["model"]["stored_as"], wide["model"]["kv_dtype"]) == ("bfloat16", "bfloat16")
    assert narrow["model"]["stored_as"] == "int4 in groups of 128"
    ratio = narrow["model"]["weight_bytes"] / wide["model"]["weight_bytes"]
    assert ratio == pytest.approx(4.125 / 16, rel=1e-3)
    kv = narrow["model"]["kv_bytes_per_token"] / wide["model"]["kv_bytes_per_token"]
    assert kv == (128 + 2) / 256
    half = plan_json(capsys, "llama-3-8b", "--dtype=float32")
    assert half["model"]["weight_bytes"] == 2 * wide["model"]["weight_bytes"]


def test_quantize_means_what_it_means_to_load(root, tmp_path, capsys):
    blocks = root / "checkpoints" / "tiny_gguf" / "deepseek_v3.gguf"
    folder = tmp_path / "saved"
    ij.save(ij.load(blocks), folder)
    for path in (blocks, folder):
        words = (str(path), "--context=64")
        as_stored = plan_json(capsys, *words)
        assert as_stored["model"]["stored_as"] == "int8 in groups of 32"
        assert as_stored["model"]["config_from"].startswith(str(path))
        assert plan_json(capsys, *words, "--quantize=native") == as_stored
        assert plan_json(capsys, *words, "--quantize=int4")["model"]["stored_as"] != "float32"
        # A dtype asks for arrays, as it does everywhere else, unless packing is asked for too.
        arrays = plan_json(capsys, *words, "--quantize=none", "--dtype=float16")
        assert arrays["model"]["stored_as"] == "float16"
        assert plan_json(capsys, *words, "--dtype=float16") == arrays
        both = plan_json(capsys, *words, "--quantize=native", "--dtype=float16")
        assert both["model"]["stored_as"] == "int8 in groups of 32"
    plain = plan_json(capsys, "llama-3-8b")
    for mode in ("native", "none"):
        assert plan_json(capsys, "llama-3-8b", f"--quantize={mode}") == plain


def test_plan_says_where_the_config_is_from(tiny, capsys):
    found = plan_json(capsys, "smollm2-135m-instruct")
    origin = "the planner's table, after HuggingFaceTB/SmolLM2-135M-Instruct"
    assert found["model"]["config_from"] == origin
    assert "SmolLM2-135M-Instruct.Q4_1.gguf" in found["notes"][0]
    out = plan(capsys, "smollm2-135m-instruct")
    assert f"; config from {origin}\n" in out
    assert "note: the catalog's model of this name is a file of its own" in out
    path = tiny / "mixtral"
    assert f"config from {path / 'config.json'}\n" in plan(capsys, str(path), "--context=64")


def test_latency_target_replaces_the_batch(capsys):
    found = plan_json(capsys, "llama-3-8b", "--chips=2", "--tpot-ms=10", "--batch=7")
    assert found["load"]["batch"] == found["decode"]["batch"] > 7
    assert found["decode"]["step"]["seconds"] <= 0.010


def test_every_flag_of_the_load_arrives(capsys):
    words = ("--prompt=300", "--chunk=100", "--requests-per-s=2", "--network-ms=30")
    words += ("--shared-prefix=128", "--page-size=16", "--reserve=0.2", "--watts=500")
    found = plan_json(capsys, "llama-3-8b", "--context=1000", *words)
    assert found["load"] == {
        "batch": 1,
        "context": 1000,
        "prompt": 300,
        "arrivals_s": 2.0,
        "network_s": 0.03,
        "shared_prefix": 128,
        "chunk": 100,
        "page_size": 16,
        "reserved_share": 0.2,
    }
    seconds = found["decode"]["step"]["seconds"]
    assert found["cost"]["joules_per_output_token"] == pytest.approx(500 * seconds)
    assert found["prefix"]["num_tokens"] == 128


def test_drafts_may_cost_time(capsys):
    words = ("llama-3-8b", "--draft-accept=0.5")
    free = plan_json(capsys, *words)["speculation"]
    paid = plan_json(capsys, *words, "--draft-share=0.1")["speculation"]
    assert free["draft_len"] == 4
    assert paid["speedup"] < free["speedup"]
    assert plan_json(capsys, "llama-3-8b")["speculation"] is None


def test_axes_that_are_given_are_the_mesh(capsys):
    found = plan_json(capsys, "mixtral-8x7b", "--chips=8", "--ep=4", "--tp=2")
    assert found["mesh"] == {"tp": 2, "dp": 1, "ep": 4}
    assert Mesh(tp=2, ep=4).num_chips == 8


def test_mesh_that_divides_badly_says_what_happens(capsys):
    out = plan(capsys, "gemma-3-1b", "--chips=4", "--tp=4")
    assert "note: 1 key/value head on 4 chips: each is held 4 times" in out


def test_model_without_a_head_for_tokens_says_so(tiny, capsys):
    out = plan(capsys, str(tiny / "llama_classifier"), "--context=64")
    assert "note: the model predicts no tokens" in out


@pytest.mark.parametrize("kind", ["folder", "config", "config_alone"])
def test_plan_of_a_path_reads_the_config_only(kind, tiny, tmp_path, capsys):
    copy = tmp_path / "anything.json"
    shutil.copy(tiny / "mixtral" / "config.json", copy)
    paths = {
        "folder": tiny / "mixtral",
        "config": tiny / "mixtral" / "config.json",
        "config_alone": copy,
    }
    found = plan_json(capsys, str(paths[kind]), "--context=64")
    assert found["model"]["family"] == "mixtral"


def test_plot_is_a_png_of_every_mesh_that_fits(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    plan(capsys, "llama-3-8b", "--chips=2", f"--plot={path}")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "is no folder" in refused(capsys, "llama-3-8b", f"--plot={tmp_path}/none/plan.png")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("llama-3-8b", "--chip=h1000"), "use one of a100-40gb, a100, h100"),
        (("llama-3-700b",), "no model is called 'llama-3-700b'"),
        (("llama-3-70b",), "70.8 GB are missing on every chip"),
        (
            ("llama-3-70b",),
            "quantize the weights to int4-g128 with keys and values in bfloat16; or use 2 chips",
        ),
        (("llama-3-8b", "--chips=8", "--tp=3"), "no mesh of 8 chips"),
        (("llama-3-8b", "--chips=8", "--ep=8"), "the model is dense"),
        (("llama-3-8b", "--chips=0"), "0 chips"),
        (("llama-3-8b", "--chips=5000"), "1 to 4096 are planned for"),
        (("llama-3-8b", "--chip=local", "--chips=2"), "measured as one chip"),
        (("llama-3-8b", "--chunk=1", "--context=5000"), "at most 4096 chunks"),
        (("llama-3-8b", "--price-per-chip-hour=inf"), "price is inf"),
        (("llama-3-8b", "--tpot-ms=nan"), "a time per token of nan ms"),
        (("llama-3-8b", "--quantize=int3"), "there is no such scheme"),
        (("llama-3-8b", "--quantize=int3"), "native (as the file has it) or none (arrays)"),
        (("llama-3-8b", "--shared-prefix=5000", "--prompt=8000"), "give at most 4095"),
        (("llama-3-8b", "--kv=int3"), "keys and values are not stored so"),
        (("llama-3-8b", "--batch=0"), "batch is 0"),
        (("llama-3-8b", "--context=9000"), "the model's context is 8192"),
        (("llama-3-8b", "--tpot-ms=0.1"), "allow more time, quantize"),
        (("llama-3-8b", "--requests-per-s=100000"), "the queue grows"),
        (("llama-3-8b", "--draft-accept=7"), "a probability lies between 0 and 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_clear_error(words, text, capsys):
    assert text in refused(capsys, *words)


def test_damaged_config_is_one_clear_error(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "hidden_size": "x"}')
    assert "config.json" in refused(capsys, str(path))
    path.write_text("{")
    assert refused(capsys, str(path))


def test_plan_for_this_machine_is_measured(tiny, tmp_path, capsys):
    raw = json.loads((tiny / "llama" / "config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw | {"num_hidden_layers": 1}))
    found = plan_json(capsys, str(path), "--chip=local", "--context=32")
    chip = found["chip"]
    assert chip["name"] == "local"
    assert chip["bandwidth"] > 1e8
    assert chip["memory_bytes"] > 1e9
    (measured,) = chip["measured"]
    assert measured["rows"] == 1
    assert measured["step_s"] >= 0
    step = found["decode"]["step"]
    parts = step["weights_s"] + step["kv_s"] + step["fixed_s"]
    assert step["seconds"] == pytest.approx(parts)
    # `load` makes float32 arrays of bfloat16 weights here.
    assert found["model"]["stored_as"] == "float32"
