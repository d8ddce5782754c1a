r"""How byte-level vocabularies cut a text into words before the merges, by `tokenizer.ggml.pre`.

A rule is the pipeline of the models' own tokenizer.json: cuts that apply in turn, each to the
pieces that the ones before it left, and what goes with them. llama.cpp departs from it in places,
and there the pipeline holds. Known: it never normalizes to NFC; its Unicode tables are of another
version; 's is not matched as 'S by a long s; letters beyond a-z count as capital and small at once
(tekken, gpt-4o, kimi-k2); spaces beyond ASCII are in no class of characters (deepseek-llm,
deepseek-coder); digits before letters are grouped from the right (tiny_aya); bytes that the
vocabulary lacks vanish after the merges, not before.

Source: the `pre_tokenizer` of each model's tokenizer.json, and llama.cpp's src/llama-vocab.cpp.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers

# A regular expression whose matches stand apart, or a maker of the library's own cut.
Cut = str | Callable[[], Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WordRule:
    """What a pre-tokenizer's name stands for.

    `whole_words`: a word that is itself a token is taken whole, whatever the merges would give.
    `bos`: BOS goes in front unless the file says otherwise. `nfc`: texts are normalized first.
    """

    cuts: tuple[Cut, ...]
    whole_words: bool = False
    bos: bool = False
    nfc: bool = False

    def pre_tokenizer(self) -> Any:
        """Return the cuts, then the spelling of bytes, as the library's pre-tokenizer."""
        cuts = [_cutter(cut) for cut in self.cuts]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*cuts, byte_level])


def _cutter(cut: Cut) -> Any:
    if isinstance(cut, str):
        return pre_tokenizers.Split(tokenizers.Regex(cut), "isolated")
    return cut()


def _one_digit() -> Any:
    return pre_tokenizers.Digits(individual_digits=True)


def _punctuation() -> Any:
    return pre_tokenizers.Punctuation("contiguous")


def _class_of(ranges: str) -> str:
    """Write code points and their ranges, in hexadecimal, as the inside of a character class."""
    spans = [span.split("-") for span in ranges.split()]
    return "".join("-".join(f"\\x{{{end}}}" for end in span) for span in spans)


_SPACES = r"|\s+(?!\S)|\s+"
_LINES = r"|\s*[\r\n]+" + _SPACES
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+" + _SPACES
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = rf"{_ENDING}|{_WORD}|\p{{N}}{{1,3}}{_SYMBOLS}{_LINES}"
_QWEN2 = rf"{_ENDING}|{_WORD}|\p{{N}}{_SYMBOLS}{_LINES}"
_QWEN35 = (
    rf"{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_LINES}"
)
_SEED = rf"{_ENDING}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+{_LINES}"
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
    + _SPACES
)
_EXAONE_MOE = (
    rf"{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]{_SPACES}"
)
_JAIS2 = (
    rf"{_ENDING}|{_WORD}|\p{{N}}{{1,3}}{_SYMBOLS}|\s*[\r\n]+"
    + "".join(
        rf"|\s{{{times}}}(?!\S)"
        for times in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")
    )
    + r"|\s{1}"
)


def _cased(
    ending: str, number: str, *, excluded: str = "", after_symbols: str = r"[\r\n/]*"
) -> str:
    """Words as capitals then small letters, or all capitals, with an `ending` or none."""
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{excluded}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{excluded}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{upper}*{lower}+{ending}|{before}{upper}+{lower}*{ending}|{number}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+{after_symbols}{_LINES}"
    )


_GPT4O = _cased(_ENDING + "?", r"\p{N}{1,3}")
_TEKKEN = _cased("", r"\p{N}")
_KIMI = r"\p{Han}+|" + _cased(
    _ENDING + "?", r"\p{N}{1,3}", excluded=r"&&[^\p{Han}]", after_symbols=r"[\r\n]*"
)

# As \d{1,3}(?=(?:\d{3})*\b) and then words of _GPT4O, but in linear time: numbers that no letter
# follows, then their one or two digits too many; the words take the threes.
_THREES_FROM_THE_RIGHT = (r"(?<!\d)\d++(?!\w)", r"(?<!\d)\d{1,2}(?=(?:\d{3})++(?!\w))")
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _LINES,
)
# The cased letters of Unicode 11: what the first DeepSeek tokenizers call a letter.
_CASED_LETTERS = _class_of(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 "
    "388-38A 38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA "
    "1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 "
    "1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB "
    "1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D "
    "212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 "
    "A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A "
    "FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF "
    "1E900-1E943"
)
_OTHER_SCRIPTS = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
    r"\s+$",
    _OTHER_SCRIPTS,
    _one_digit,
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _OTHER_SCRIPTS, _one_digit)
_FALCON = (_punctuation, _GPT2, "[0-9][0-9][0-9]")
_BLOOM = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+"
# What llama.cpp does with files that name no pre-tokenizer; nothing else defines it.
_UNNAMED = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")

_LLAMA3_RULE = WordRule(cuts=(_LLAMA3,), whole_words=True, bos=True)
_DIGITS_RULE = WordRule(cuts=(_one_digit, _GPT2))

# The names that share a rule stand in one line.
_NAMED: tuple[tuple[str, WordRule], ...] = (
    ("default", WordRule(cuts=_UNNAMED)),
    ("gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0", WordRule(cuts=(_GPT2,))),
    ("mellum modern-bert jina-v1-en jina-v2-code roberta-bpe", WordRule(cuts=(_GPT2,))),
    ("exaone4 jais trillion granite-docling", WordRule(cuts=(_GPT2,))),
    ("mpt olmo", WordRule(cuts=(_GPT2,), nfc=True)),
    ("starcoder refact smollm codeshell exaone minerva-7b mellum2", _DIGITS_RULE),
    ("command-r", WordRule(cuts=(_one_digit, _GPT2), nfc=True)),
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        _LLAMA3_RULE,
    ),
    ("dbrx smaug-bpe chatglm-bpe", WordRule(cuts=(_LLAMA3,))),
    ("glm4 glm5", WordRule(cuts=(_LLAMA3,), whole_words=True)),
    ("minicpm5", WordRule(cuts=(r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+")), whole_words=True)),
    ("jais-2", WordRule(cuts=(_JAIS2,))),
    ("qwen2 deepseek-r1-qwen f2llmv2 megrez", WordRule(cuts=(_QWEN2,), nfc=True)),
    ("stablelm2 hunyuan kormo solar-open grok-2", WordRule(cuts=(_QWEN2,))),
    ("qwen35", WordRule(cuts=(_QWEN35,), nfc=True)),
    ("ufakzeka", WordRule(cuts=(_QWEN2.removeprefix(_ENDING + "|"),))),
    ("laguna", WordRule(cuts=(r"[^\n]+|[\n]+", _QWEN2))),
    ("seed-coder", WordRule(cuts=(_SEED,))),
    ("bailingmoe bailingmoe2 llada-moe", WordRule(cuts=(_BAILING,))),
    ("exaone-moe", WordRule(cuts=(_EXAONE_MOE,))),
    ("deepseek-llm", WordRule(cuts=_DEEPSEEK_LLM)),
    ("deepseek-coder", WordRule(cuts=_DEEPSEEK_CODER)),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", WordRule(cuts=_DEEPSEEK3)),
    ("falcon", WordRule(cuts=_FALCON)),
    ("bloom gpt3-finnish poro-chat", WordRule(cuts=(_BLOOM,))),
    ("viking", WordRule(cuts=(_BLOOM, _one_digit))),
    ("tekken", WordRule(cuts=(_TEKKEN,), whole_words=True, bos=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", WordRule(cuts=(_GPT4O,))),
    ("granite-embed-multi-97m", WordRule(cuts=(_GPT4O,), whole_words=True)),
    ("tiny_aya cohere2moe", WordRule(cuts=(*_THREES_FROM_THE_RIGHT, _GPT4O))),
    ("kimi-k2", WordRule(cuts=(_KIMI,))),
)
WORD_RULES: dict[str, WordRule] = {name: rule for names, rule in _NAMED for name in names.split()}
