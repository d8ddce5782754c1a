import subprocess
import sys
import types

import pytest

from inferjax.cli import main as cli
from inferjax.errors import InvalidInput


@pytest.fixture
def command(monkeypatch):
    """Offer a command `try` whose run() is what the test says."""

    def install(run):
        module = types.ModuleType("fake_command")
        module.add_arguments = lambda parser: parser.add_argument("word", nargs="?")  # type: ignore[attr-defined]
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "fake_command", module)
        monkeypatch.setitem(cli.COMMANDS, "try", ("fake_command", "a command of this test"))

    return install


def fail(args):
    raise InvalidInput("the prompt is empty", why="it has 0 tokens", fix="say something")


def test_main_prints_the_three_parts_of_an_error_without_a_traceback(command, capsys):
    command(fail)
    assert cli.main(["try"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "inferjax: the prompt is empty\n  Why: it has 0 tokens\n  Fix: say something\n"


@pytest.mark.parametrize("words", [["--traceback", "try"], ["try", "--traceback"]])
def test_main_shows_the_traceback_on_request(command, capsys, words):
    command(fail)
    assert cli.main(words) == 2
    assert "Traceback" in capsys.readouterr().err


def test_main_ends_an_interrupt_with_130(command, capsys):
    def interrupt(args):
        raise KeyboardInterrupt

    command(interrupt)
    assert cli.main(["try"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_main_does_not_hide_a_bug(command):
    def bug(args):
        return [].pop()

    command(bug)
    with pytest.raises(IndexError):
        cli.main(["try"])


def test_main_passes_the_exit_code_on(command):
    command(lambda args: 5 if args.word == "five" else 0)
    assert cli.main(["try", "five"]) == 5
    assert cli.main(["try"]) == 0


@pytest.mark.parametrize("words", [[], ["no-such-command"], ["models", "--no-such-flag"]])
def test_main_refuses_unknown_words_with_usage(words, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    assert "usage: inferjax" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_main_help_of_every_command_explains_its_flags(name, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([name, "--help"])
    assert caught.value.code == 0
    assert f"usage: inferjax {name}" in capsys.readouterr().out


def test_main_help_does_not_import_the_commands():
    code = (
        "import sys; from inferjax.cli.main import parser_for; parser_for(['--help']);"
        "print([n for n in ('inferjax.cli.session', 'inferjax.bench') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
