"""Rules that keep the source small, its errors typed and its state visible, checked by syntax."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = sorted((ROOT / "inferjax").rglob("*.py"))
# Scripts that the Pythons of other engines run: programs, not the library.
PEERS = ROOT / "inferjax" / "bench" / "peers"
LIBRARY = [path for path in PACKAGE if path.parent != PEERS]
KERNELS = sorted((ROOT / "pallas_kernels").rglob("*.py"))
ACCELERATOR_FILES = ("gpu.py", "tpu.py")
MAX_FILE, MAX_KERNEL_FILE = 400, 600
MAX_FUNCTION, MAX_KERNEL_FUNCTION = 60, 120
DECODER = "inferjax/models/decoder.py"

# Exceptions that never reach a user: a protocol asks for them, or a caller in the same folder turns
# them into one of our errors. At most five files.
SIGNALS = {
    "inferjax/errors.py": {"AttributeError"},
    "inferjax/checkpoint/safetensors.py": {"ValueError"},
    "inferjax/checkpoint/opened.py": {"ValueError"},
    "inferjax/checkpoint/saved_leaves.py": {"ValueError"},
    "inferjax/tokenizer/sandbox.py": {"TemplateRefusal"},
}


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def dotted(node: ast.AST) -> str:
    """Return `a.b.c` for a chain of names, "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def imported_from(tree: ast.Module, module: str) -> set[str]:
    return {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == module
        for alias in node.names
    }


def uses(tree: ast.Module, module: str, name: str) -> list[int]:
    """Return the lines that reach `module.name`, as an attribute or by importing the name."""
    lines = [n.lineno for n in ast.walk(tree) if dotted(n) == f"{module}.{name}"]
    return lines or [1] * (name in imported_from(tree, module))


def error_kinds() -> set[str]:
    tree = tree_of(ROOT / "inferjax" / "errors.py")
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


def makers(tree: ast.Module, kinds: set[str]) -> set[str]:
    """Return the file's own functions that are annotated to return an error to raise."""
    return {
        f.name for f in functions(tree) if f.returns and dotted(f.returns).split(".")[-1] in kinds
    }


def foreign_raises(path: Path, kinds: set[str]) -> list[str]:
    tree = tree_of(path)
    allowed = kinds | makers(tree, kinds) | SIGNALS.get(name_of(path), set())
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Raise) or node.exc is None:
            continue
        raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        if dotted(node.exc) == "delta.error":  # one of ours, on its way to whom it concerns
            continue
        if dotted(raised).split(".")[-1] not in allowed:
            found.append(f"{name_of(path)}:{node.lineno} raises {ast.unparse(raised)}")
    return found


def test_raise_is_always_one_of_our_errors():
    kinds = error_kinds()
    assert "InferjaxError" in kinds
    assert [line for path in LIBRARY for line in foreign_raises(path, kinds)] == []


def test_signals_are_few():
    assert len(SIGNALS) <= 5


def test_foreign_raise_is_found(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    bad = tmp_path / "bad.py"
    bad.write_text("def f(x):\n    if x:\n        raise ValueError(x)\n    raise\n")
    assert foreign_raises(bad, {"ShapeError"}) == ["bad.py:3 raises ValueError"]


def test_assert_is_not_used():
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in PACKAGE
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Assert)
    ]
    assert found == []


def outside(*folders: str) -> list[Path]:
    return [p for p in LIBRARY if p.relative_to(ROOT / "inferjax").parts[0] not in folders]


@pytest.mark.parametrize("name", ["environ", "getenv", "environb"])
def test_environment_is_read_only_by_the_command_line(name):
    found = [f"{name_of(p)}:{n}" for p in outside("cli") for n in uses(tree_of(p), "os", name)]
    assert found == []


@pytest.mark.parametrize("name", ["jit", "pmap"])
def test_jit_is_called_only_by_runtime_calibrate_and_bench(name):
    # The decoder's one jit lets equal layers share a trace.
    files = [p for p in outside("runtime", "calibrate", "bench") if name_of(p) != DECODER]
    files += KERNELS
    found = [f"{name_of(p)}:{n}" for p in files for n in uses(tree_of(p), "jax", name)]
    assert found == []


def test_print_is_left_to_the_command_line():
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in outside("cli", "bench")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and dotted(node.func) == "print"
    ]
    assert found == []


@pytest.mark.parametrize("path", PACKAGE + KERNELS, ids=name_of)
def test_file_and_its_functions_are_short(path):
    accelerator = path in KERNELS and path.name in ACCELERATOR_FILES
    num_lines = len(path.read_text(encoding="utf-8").splitlines())
    assert num_lines <= (MAX_KERNEL_FILE if path in KERNELS else MAX_FILE)
    limit = MAX_KERNEL_FUNCTION if accelerator else MAX_FUNCTION
    long = [
        f"{f.name}: {length} lines"
        for f in functions(tree_of(path))
        if (length := (f.end_lineno or 0) - f.lineno + 1) > limit
    ]
    assert long == []


def test_vague_module_names_are_not_used():
    vague = {"utils", "util", "helpers", "helper", "manager", "common", "misc"}
    assert [name_of(p) for p in PACKAGE + KERNELS if vague & {p.stem, *p.parent.parts[-2:]}] == []


def test_dataclass_pytrees_do_not_run_code_when_they_are_rebuilt():
    """`__post_init__` of a pytree runs on every unflatten, with tracers."""
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in PACKAGE
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
        and any(dotted(d).split(".")[-1] == "pytree" for d in node.decorator_list)
        and any(isinstance(n, ast.FunctionDef) and n.name == "__post_init__" for n in node.body)
    ]
    assert found == []
