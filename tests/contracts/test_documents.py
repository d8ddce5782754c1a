"""What README and its kin promise is there: commands parse, targets exist, links lead somewhere."""

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest

from inferjax.cli.main import parser_for

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
DOCUMENTS += sorted((ROOT / "docs").glob("*.md"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL)


def command_lines() -> list[list[str]]:
    text = "\n".join(block for document in DOCUMENTS for block in blocks(document, "sh"))
    return [words for line in text.splitlines() if (words := shlex.split(line, comments=True))]


def test_readme_starts_with_two_make_commands():
    makes = [words for words in command_lines() if words[0] == "make"]
    assert makes[:2] == [["make", "demo"], ["make", "test"]]


def test_document_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    text = "\n".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
    targets = set(re.findall(r"`make ([a-z-]+)`", text))
    targets |= {words[1] for words in command_lines() if words[0] == "make"}
    assert targets >= {"demo", "test", "test-all"}
    assert [t for t in targets if not re.search(rf"^{t}:", makefile, re.MULTILINE)] == []


def test_document_inferjax_commands_parse():
    lines = [words[1:] for words in command_lines() if Path(words[0]).name == "inferjax"]
    assert lines
    for words in lines:
        parser_for(words).parse_args(words)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_document_links_lead_somewhere(document):
    links = re.findall(r"\]\(([^)#\s]+)\)", document.read_text(encoding="utf-8"))
    broken = [
        link
        for link in links
        if "://" not in link and not (document.parent / link).resolve().exists()
    ]
    assert broken == []


def readme_code() -> str:
    """Return the README's Python blocks as one program: a later one uses an earlier one's model."""
    return "\n".join(blocks(ROOT / "README.md", "python"))


def test_readme_python_blocks_are_valid():
    ast.parse(readme_code())


@pytest.mark.model
def test_readme_python_blocks_run():
    code = readme_code()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 3


def test_python_version_file_satisfies_the_project():
    pinned = (ROOT / ".python-version").read_text(encoding="utf-8").strip()
    assert PROJECT["project"]["requires-python"] == f">={pinned}"
    assert sys.version_info >= tuple(map(int, pinned.split(".")))


def test_jax_in_use_is_inside_the_declared_bounds():
    (declared,) = [d for d in PROJECT["project"]["dependencies"] if re.match(r"jax\b", d)]
    low, high = re.fullmatch(r"jax>=([\d.]+),<([\d.]+)", declared).groups()  # type: ignore[union-attr]

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"\d+", text)[:3])

    assert numbers(low) <= numbers(jax.__version__) < numbers(high)
    assert f'"jax[cuda13]>={low},<{high}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_core_dependencies_are_few_and_without_other_frameworks():
    names = {re.split(r"[\[<>=~!]", d)[0] for d in PROJECT["project"]["dependencies"]}
    assert not names & {"torch", "transformers", "tensorflow", "pandas"}
    assert len(names) <= 12


def test_changelog_knows_the_version_or_calls_it_unreleased():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(
        rf"^## \[({re.escape(PROJECT['project']['version'])}|Unreleased)\]", text, re.M
    )
