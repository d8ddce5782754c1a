from types import SimpleNamespace

from inferjax.cli.chat import Conversation
from inferjax.errors import RequestTooLong


class Opened:
    """A session whose model repeats the last message; prompt ids are the number of messages."""

    weight_bytes = 1

    def __init__(self, limit: int = 99) -> None:
        self.limit = limit
        self.prompts: list[list[dict[str, str]]] = []
        self.model = SimpleNamespace(tokenizer=self)

    def apply_chat_template(self, messages):
        self.prompts.append(list(messages))
        return list(range(len(messages)))

    def reply(self, prompt_ids, emit):
        if len(prompt_ids) > self.limit:
            raise RequestTooLong(f"prompt has {len(prompt_ids)} tokens, limit is {self.limit}")
        text = f"echo {self.prompts[-1][-1]['content']}"
        emit(text)
        return SimpleNamespace(text=text)


def talk(opened, lines, **options):
    """Run a conversation whose user types `lines`; an exception among them is raised."""
    typed = iter([*lines, EOFError()])
    out, notes = [], []

    def read(prompt):
        line = next(typed)
        if isinstance(line, BaseException):
            raise line
        return line

    Conversation(opened, read=read, write=out.append, note=notes.append, **options).talk()
    return "".join(out), "".join(notes)


def test_chat_sends_the_whole_conversation_each_time():
    opened = Opened()
    out, _ = talk(opened, ["one", "two"], system="be brief")
    assert out == "echo one\necho two\n"
    assert opened.prompts[1] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "echo one"},
        {"role": "user", "content": "two"},
    ]


def test_chat_reset_keeps_only_the_instructions():
    opened = Opened()
    talk(opened, ["one", "/reset", "two"], system="be brief")
    assert [m["content"] for m in opened.prompts[1]] == ["be brief", "two"]


def test_chat_exit_ends_at_once():
    opened = Opened()
    talk(opened, ["/exit", "never sent"])
    assert opened.prompts == []


def test_chat_interrupt_at_the_prompt_only_drops_the_line():
    opened = Opened()
    out, notes = talk(opened, [KeyboardInterrupt(), "after"])
    assert out == "echo after\n"
    assert "/exit" in notes


def test_chat_message_that_does_not_fit_is_dropped_and_explained():
    opened = Opened(limit=2)
    out, notes = talk(opened, ["one", "two", "three"])
    assert out == "echo one\n"
    assert notes.count("prompt has 3 tokens, limit is 2") == 2
    assert [m["content"] for m in opened.prompts[2]] == ["one", "echo one", "three"]


def test_chat_unknown_command_and_empty_line_are_not_sent():
    opened = Opened()
    _, notes = talk(opened, ["", "   ", "/what"])
    assert opened.prompts == []
    assert "/reset" in notes
