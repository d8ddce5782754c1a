"""The tokenizer: text to ids, ids to text, chat messages to ids."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, SupportsIndex, final, overload

import tokenizers

from inferjax.errors import TemplateError
from inferjax.tokenizer.chat import ChatTemplate
from inferjax.tokenizer.detokenizer import Detokenizer, TokenBytes, token_bytes_of
from inferjax.tokenizer.untrusted import encode_ids, is_text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """The tokens a vocabulary sets apart, and what goes around a raw text.

    `eos` lists every id that ends a generation, the usual one first. `prefix` and `suffix` are the
    ids put around a raw text (BOS, and for a few models EOS).
    """

    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None
    unk: int | None = None
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()


@final
class Tokenizer:
    """A vocabulary of the `tokenizers` library with its special tokens and chat templates.

    `templates` are named; "default" serves every conversation and "tool_use", where there is one,
    those with tools.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        special: SpecialTokens,
        templates: Mapping[str, str] | None = None,
    ) -> None:
        self._core = core
        self._special = special
        self._templates = dict(templates or {})
        self._compiled: dict[str, ChatTemplate] = {}
        self._token_bytes = token_bytes_of(core)
        self._added = core.get_added_tokens_decoder()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`.

        `add_special_tokens` puts BOS in front when the vocabulary asks for it, unless the text
        itself begins with it: there is never a second one.

        Raises: TokenizerError for what is not valid text.
        """
        ids = self._encode_text(text)
        if not add_special_tokens:
            return ids
        return [*self._missing_prefix(ids), *ids, *self._special.suffix]

    def decode(self, ids: Iterable[SupportsIndex], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; an id outside the vocabulary stands for no text."""
        stream = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return stream.push_many(ids) + stream.flush()

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """Return a fresh stream whose pieces join to what `decode` gives."""

        def spell(token_id: int) -> bytes:
            return self._spell(token_id, skip_special_tokens)

        return Detokenizer(spell, self._token_bytes.strip)

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        tokenize: Literal[True] = True,
        **context: Any,
    ) -> list[int]: ...
    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        tokenize: Literal[False],
        **context: Any,
    ) -> str: ...
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        tokenize: bool = True,
        **context: Any,
    ) -> list[int] | str:
        """Render `messages` with the checkpoint's template, to ids or to text.

        The ids hold BOS exactly once when the vocabulary asks for it, whether or not the template
        writes it. `context` reaches the template as variables.

        Raises: TemplateError for a missing, failing or too costly template, or bad messages.
        """
        text = self._chat_template(tools).render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            **(self._named_tokens() | context),
        )
        if not tokenize:
            return text
        ids = self._encode_text(text)
        return [*self._missing_prefix(ids), *ids]

    @property
    def core(self) -> tokenizers.Tokenizer:
        """The vocabulary as the `tokenizers` library holds it; not to be changed."""
        return self._core

    @property
    def special(self) -> SpecialTokens:
        """The special tokens, and what goes around a raw text."""
        return self._special

    @property
    def templates(self) -> Mapping[str, str]:
        """The chat templates' sources by name."""
        return dict(self._templates)

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint brought a chat template."""
        return bool(self._templates)

    @property
    def bos_id(self) -> int | None:
        """The id that begins a text."""
        return self._special.bos

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends a generation, the usual one first."""
        return self._special.eos

    @property
    def pad_id(self) -> int:
        """The id that fills unused positions: the vocabulary's own, else the first EOS, else 0."""
        if self._special.pad is not None:
            return self._special.pad
        return self._special.eos[0] if self._special.eos else 0

    @property
    def unk_id(self) -> int | None:
        """The id that stands for text the vocabulary cannot spell."""
        return self._special.unk

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids that `skip_special_tokens` leaves out."""
        return frozenset(i for i, token in self._added.items() if token.special)

    @property
    def vocab_size(self) -> int:
        """The number of tokens, added ones included; a model's table may be padded beyond it."""
        return self._core.get_vocab_size(with_added_tokens=True)

    def id_to_token(self, token_id: int) -> str | None:
        """Return the vocabulary's own spelling of an id, None outside it."""
        return self._core.id_to_token(token_id) if 0 <= token_id < 2**32 else None

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token in the vocabulary's own spelling, None for an unknown one."""
        return self._core.token_to_id(token) if is_text(token) else None

    def _encode_text(self, text: str) -> list[int]:
        return encode_ids(self._core, text, add_special_tokens=False)

    def _missing_prefix(self, ids: list[int]) -> tuple[int, ...]:
        prefix = self._special.prefix
        return () if tuple(ids[: len(prefix)]) == prefix else prefix

    def _spell(self, token_id: int, skip_special_tokens: bool) -> bytes:
        added = self._added.get(token_id)
        if added is None:
            piece = self.id_to_token(token_id)
            return b"" if piece is None else self._token_bytes.spell(piece)
        if added.special and skip_special_tokens:
            return b""
        return _spell_added(added.content, self._token_bytes)

    def _chat_template(self, tools: Sequence[Mapping[str, Any]] | None) -> ChatTemplate:
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise TemplateError(
                "the checkpoint has no chat template",
                why=f"it names {sorted(self._templates) or 'none'}",
                fix="use encode() with a plain prompt, or an instruction-tuned checkpoint",
            )
        if name not in self._compiled:
            self._compiled[name] = ChatTemplate(self._templates[name])
        return self._compiled[name]

    def _named_tokens(self) -> dict[str, str]:
        """Return bos_token and its kin; a template sees the missing ones as undefined."""
        special = self._special
        eos = special.eos[0] if special.eos else None
        ids = {"bos_token": special.bos, "eos_token": eos}
        ids |= {"pad_token": special.pad, "unk_token": special.unk}
        named = {name: self.id_to_token(i) for name, i in ids.items() if i is not None}
        return {name: token for name, token in named.items() if token is not None}


def _spell_added(content: str, token_bytes: TokenBytes) -> bytes:
    """Spell an added token: plain text already, except for spaces a metaspace vocabulary marks."""
    if token_bytes.kind == "byte_level":
        return content.encode()
    return token_bytes.spell(content)
