"""Reads a Hugging Face config strictly: a key is used, on an ignore list, or an error naming it.

A family asks a `ConfigReader` for what it needs. What nobody asked for is reported by `finish`,
because a key that is silently skipped is how a model ends up running with the wrong rope or window.
"""

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NoReturn, overload

from inferjax.config import Activation
from inferjax.errors import UnsupportedConfig, UnsupportedModel

MAX_LAYERS = 10_000
MAX_EXPERTS = 65_536
MAX_SIZE = 2**24
MAX_LABELS = 2**17
MAX_CONTEXT = 2**30

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "relu": "relu",
}
DTYPES = ("float32", "bfloat16", "float16")


class _Required:
    """Marks a getter's default as absent: the key must be there."""


REQUIRED = _Required()


class ConfigReader:
    """Hands out a config's values, typed and range-checked, and remembers what was asked for.

    The typed getters take null for absent. `max_context` is the context the caller wants, when it
    differs from the one the checkpoint declares.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        *,
        where: str = "config.json",
        ignored: Collection[str] = (),
        max_context: int | None = None,
    ) -> None:
        self.max_context = max_context
        self._raw, self._where = raw, where
        self._ignored = frozenset(ignored)
        self._used: set[str] = set()

    def value(self, key: str) -> Any:
        """Return the raw value of `key`, None if it is absent."""
        self._used.add(key)
        return self._raw.get(key)

    def given(self, key: str, default: Any) -> Any:
        """Return the raw value of `key`, which may be null, or `default` if the key is absent."""
        self._used.add(key)
        return self._raw.get(key, default)

    @overload
    def integer(
        self, key: str, default: int | _Required = ..., *, low: int = ..., high: int = ...
    ) -> int: ...
    @overload
    def integer(
        self, key: str, default: None, *, low: int = ..., high: int = ...
    ) -> int | None: ...
    def integer(
        self,
        key: str,
        default: int | _Required | None = REQUIRED,
        *,
        low: int = 1,
        high: int = MAX_SIZE,
    ) -> int | None:
        """Return a whole number within [low, high]; other keys may rule its default out."""
        value = self.value(key)
        if value is None:
            value = self._default(key, default)
        if value is None:
            return None
        if type(value) is not int or not low <= value <= high:
            self.refuse(key, value, f"it must be a whole number from {low} to {high}")
        return value

    @overload
    def number(
        self, key: str, default: float | _Required = ..., *, low: float = ..., high: float = ...
    ) -> float: ...
    @overload
    def number(
        self, key: str, default: None, *, low: float = ..., high: float = ...
    ) -> float | None: ...
    def number(
        self,
        key: str,
        default: float | _Required | None = REQUIRED,
        *,
        low: float = 0.0,
        high: float = 1e15,
    ) -> float | None:
        """Return a finite number within [low, high]."""
        value = self.value(key)
        if value is None:
            return self._default(key, default)
        if type(value) not in (int, float) or not low <= value <= high:
            self.refuse(key, value, f"it must be a number from {low:g} to {high:g}")
        return float(value)

    def positive(self, key: str, default: float | _Required = REQUIRED) -> float:
        """Return a number that can be divided by."""
        return self.number(key, default, low=1e-30)

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self.value(key)
        if value is None:
            return default
        if type(value) is not bool:
            self.refuse(key, value, "it must be true or false")
        return value

    def choice[T](self, key: str, choices: Mapping[str, T], default: str | None = None) -> T:
        """Return what `choices` maps the key's text to."""
        value = self.value(key)
        value = default if value is None else value
        if not isinstance(value, str) or value not in choices:
            self.refuse(key, value, f"it must be one of {', '.join(sorted(choices))}")
        return choices[value]

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Return a list of `count` positive numbers."""
        values = self.value(key)
        good = isinstance(values, list) and len(values) == count
        if not good or not all(type(v) in (int, float) and 0 < v < 1e15 for v in values):
            self.refuse(key, values, f"it must be a list of {count} positive numbers")
        return tuple(float(v) for v in values)

    def expect(self, key: str, *allowed: object) -> None:
        """Refuse any value but the ones for which the model is implemented; absent is fine."""
        value = self.value(key)
        if value is not None and not any(_same(value, good) for good in allowed):
            wanted = " or ".join(repr(good) for good in allowed)
            self.refuse(key, value, f"only {wanted} is implemented")

    def refuse(self, key: str, value: object, why: str) -> NoReturn:
        """Raise the error that names a key and its value."""
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        raise UnsupportedConfig(
            f"{self._where}: {key} is {shown}" if value is not None else f"{self._where}: no {key}",
            why=why,
            key=key,
            value=value,
        )

    def finish(self) -> None:
        """Raise if any key was neither asked for nor on an ignore list.

        Raises: UnsupportedConfig naming every such key.
        """
        known = self._used | self._ignored
        unknown = sorted(str(key) for key in self._raw if key not in known)
        if not unknown:
            return
        close = {key: difflib.get_close_matches(key, known, 1) for key in unknown[:20]}
        hints = [f"{key} (like {near[0]}?)" if near else key for key, near in close.items()]
        more = f" and {len(unknown) - 20} more" if len(unknown) > 20 else ""
        raise UnsupportedConfig(
            f"{self._where} has keys that are not understood: {', '.join(hints)}{more}",
            why="a key that is skipped could change the result",
            fix="correct the name, or remove a key that you know to have no effect on the logits",
            keys=unknown,
        )

    def _default[T](self, key: str, default: T | _Required) -> T:
        if isinstance(default, _Required):
            self.refuse(key, None, "the model's shape depends on it")
        return default


def _same(value: object, good: object) -> bool:
    """Compare as JSON does: true is not 1, while 1 and 1.0 are one number."""
    return isinstance(value, bool) == isinstance(good, bool) and value == good


Head = Literal["vocabulary", "labels", "none"]


def read_common(reader: ConfigReader, architectures: Sequence[str]) -> Head:
    """Check what is common to all configs, and return which head the checkpoint has.

    Raises: UnsupportedModel if the checkpoint was saved for an unknown task.
    """
    reader.value("model_type")
    given = reader.value("architectures")
    given = [architectures[0]] if given is None or given == [] else given
    known = _heads(architectures)
    names = given if isinstance(given, list) else [given]
    heads: list[Head | None] = [known.get(str(name)) for name in names]
    head = heads[0] if len(set(heads)) == 1 else None
    if head is None:
        raise UnsupportedModel(
            f"config.json: architectures is {str(given)[:200]}",
            why="the checkpoint was saved for another task or model",
            fix=f"use a checkpoint of {', '.join(known)}",
            key="architectures",
        )
    reader.value("quantization_config")
    for key in ("is_encoder_decoder", "add_cross_attention", "tie_encoder_decoder"):
        reader.expect(key, False)
    reader.expect("pruned_heads", {})
    reader.flag("is_decoder", True)
    reader.value("cross_attention_hidden_size")
    return head


def _heads(architectures: Sequence[str]) -> dict[str, Head]:
    """Return every name that a family's checkpoints go by, and the head that each has."""
    heads: dict[str, Head] = dict.fromkeys(architectures, "vocabulary")
    for name in architectures:
        stem = name.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
        heads |= {f"{stem}ForSequenceClassification": "labels", f"{stem}Model": "none"}
    return heads


def read_labels(reader: ConfigReader) -> tuple[str, ...]:
    """Return the names of a classifier's labels; two nameless ones if the config has none."""
    names = reader.value("id2label")
    if names is None:
        return tuple(f"LABEL_{i}" for i in range(reader.integer("num_labels", 2, high=MAX_LABELS)))
    count = len(names) if isinstance(names, dict) else 0
    if not 1 <= count <= MAX_LABELS or set(names) != {str(i) for i in range(count)}:
        reader.refuse("id2label", names, "it must name the labels 0, 1, 2, ...")
    reader.expect("num_labels", count)
    return tuple(str(names[str(i)]) for i in range(count))


def read_dtype(reader: ConfigReader) -> str:
    """Return the dtype of the weights, under its old name or its new one."""
    old, new = reader.value("torch_dtype"), reader.value("dtype")
    if old is not None and new is not None and old != new:
        reader.refuse("dtype", new, f"torch_dtype says {str(old)[:40]!r}")
    names = {prefix + name: name for name in DTYPES for prefix in ("", "torch.")}
    return reader.choice("torch_dtype" if new is None else "dtype", names, "float32")


def read_token_ids(
    reader: ConfigReader,
    vocab_size: int,
    *,
    bos: int | None = None,
    eos: int | list[int] | None = None,
) -> dict[str, Any]:
    """Return bos_id, eos_ids and pad_id; ids outside the vocabulary cannot occur: drop them."""
    raw_bos, raw_eos = reader.given("bos_token_id", bos), reader.given("eos_token_id", eos)
    raw_pad = reader.value("pad_token_id")
    eos_list = raw_eos if isinstance(raw_eos, list) else [raw_eos]
    for key, value in (
        ("bos_token_id", raw_bos),
        ("pad_token_id", raw_pad),
        *(("eos_token_id", value) for value in eos_list),
    ):
        if value is not None and type(value) is not int:
            reader.refuse(key, value, "it must be a token id")

    def inside(value: int | None) -> int | None:
        return value if value is not None and 0 <= value < vocab_size else None

    return {
        "bos_id": inside(raw_bos),
        "eos_ids": tuple(v for v in eos_list if inside(v) is not None),
        "pad_id": inside(raw_pad),
    }


def read_heads(
    reader: ConfigReader,
    model_dim: int,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
) -> tuple[int, int, int]:
    """Return the numbers of query heads and key/value heads, and the head's width.

    `kv_heads` and `head_dim` stand in for absent keys. Null is as many key/value heads as query
    heads, and an even share of the model's width.
    """
    heads = reader.integer("num_attention_heads", high=65_536)
    if reader.given("num_key_value_heads", kv_heads) is None:
        kv_heads = heads
    kv_heads = reader.integer("num_key_value_heads", kv_heads or heads, high=65_536)
    if heads % kv_heads:
        reader.refuse("num_key_value_heads", kv_heads, f"it must divide the {heads} query heads")
    if reader.given("head_dim", head_dim) is None:
        if model_dim % heads:
            reader.refuse(
                "hidden_size", model_dim, f"without head_dim it must divide by {heads} heads"
            )
        return heads, kv_heads, model_dim // heads
    return heads, kv_heads, reader.integer("head_dim", head_dim or REQUIRED, high=65_536)


def read_layer_types(
    reader: ConfigReader, num_layers: int, pattern: int | Callable[[int], bool]
) -> list[bool]:
    """Return for every layer whether it attends to a sliding window.

    Without `layer_types`, `pattern` tells it of layer i; a number n says that every n-th layer is
    global and the others slide.
    """
    types = reader.value("layer_types")
    if types is None:
        slides = pattern if callable(pattern) else lambda i: bool((i + 1) % pattern)
        return [slides(i) for i in range(num_layers)]
    known = ("sliding_attention", "full_attention")
    if not isinstance(types, list) or len(types) != num_layers:
        reader.refuse("layer_types", types, f"it must be a list of {num_layers} names")
    for name in types:
        if name not in known:
            reader.refuse("layer_types", name, f"a layer is one of {', '.join(known)}")
    return [name == "sliding_attention" for name in types]


def read_context(reader: ConfigReader, key: str = "max_position_embeddings") -> int:
    """Return the context the checkpoint declares."""
    return reader.integer(key, high=MAX_CONTEXT)


def served_context(reader: ConfigReader, declared: int, *, extendable: bool = False) -> int:
    """Return the context to run with: the caller's, which only some ropes let exceed the declared.

    Raises: UnsupportedConfig if the caller's is larger and the rope is not `extendable`.
    """
    wanted = reader.max_context
    if wanted is None:
        return declared
    most = MAX_CONTEXT if extendable else declared
    if type(wanted) is not int or not 1 <= wanted <= most:
        raise UnsupportedConfig(
            f"max_context is {str(wanted)[:40]}",
            why=f"the checkpoint declares a context of {declared} tokens",
            fix=f"ask for 1 to {most}, or set rope scaling in config.json",
        )
    return wanted
