"""Chat templates: messages to the text a model was trained on."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from inferjax.errors import TemplateError
from inferjax.tokenizer.budget import MAX_SECONDS
from inferjax.tokenizer.sandbox import BoundedSandbox, TemplateRefusal

MAX_TEMPLATE_CHARS = 262_144
MAX_OUTPUT_CHARS = 16_000_000


class ChatTemplate:
    """A compiled chat template.

    Rendering takes about `max_seconds` and makes `max_output_chars` at most; `sandbox` says how far
    the bound goes. Raises: TemplateError for a source that is too long or does not compile.
    """

    def __init__(
        self,
        source: str,
        *,
        max_seconds: float = MAX_SECONDS,
        max_output_chars: int = MAX_OUTPUT_CHARS,
    ) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise TemplateError(
                f"the chat template has {len(source):,} characters",
                why=f"the limit is {MAX_TEMPLATE_CHARS:,}",
                fix="use a checkpoint with a plain chat template",
            )
        self._max_seconds = max_seconds
        self._max_output_chars = max_output_chars
        self._sandbox = BoundedSandbox()
        # The budget belongs to the environment, so one rendering at a time.
        self._lock = threading.Lock()
        try:
            self._template = self._sandbox.compile_bounded(source, max_seconds)
        except Exception as error:
            raise TemplateError(
                "the chat template does not compile",
                why=_reason(error),
                fix="use encode() with a plain prompt, or repair the checkpoint's template",
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **context: Any,
    ) -> str:
        """Return the text of `messages`.

        `add_generation_prompt` ends it where the model's answer begins.

        Raises: TemplateError for malformed messages and for a template that refuses them, fails, or
        exceeds its bounds.
        """
        _check_messages(messages)
        variables = {"documents": None} | context
        variables |= {
            "messages": [dict(message) for message in messages],
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._render(variables)
        except TemplateError:
            raise
        except Exception as error:
            raise _render_error(error) from error

    def _render(self, variables: dict[str, Any]) -> str:
        with self._lock:
            self._sandbox.budget.start(self._max_seconds)
            chunks, length = [], 0
            for chunk in self._template.generate(variables):
                length += len(chunk)
                if length > self._max_output_chars:
                    self._sandbox.budget.refuse(
                        f"more than {self._max_output_chars:,} characters of text"
                    )
                chunks.append(chunk)
            return "".join(chunks)


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if isinstance(messages, (str, bytes, Mapping)) or not messages:
        raise TemplateError(
            "there are no messages" if not messages else "messages are not a list",
            why=f"got {type(messages).__name__}",
            fix='give a list such as [{"role": "user", "content": "Hello"}]',
        )
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str):
            raise TemplateError(
                f"message {index} has no role",
                why=f"got {type(message).__name__} with role {role!r}",
                fix='every message is a mapping such as {"role": "user", "content": "Hello"}',
            )


def _render_error(error: Exception) -> TemplateError:
    match error:
        case TemplateRefusal():
            what, fix = "the chat template refuses the messages", "change the messages accordingly"
        case jinja2.exceptions.SecurityError():
            what, fix = "the chat template is unsafe", "do not use this checkpoint's template"
        case _:
            what = "the chat template fails on these messages"
            fix = "give each message the role and content the template expects"
    return TemplateError(what, why=_reason(error), fix=fix)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:500]}"
