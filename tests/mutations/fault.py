"""What a fault is: a small change of our source."""

import dataclasses
from typing import Any

BATCH = "inferjax.engine.batch:"
COLLECT = "inferjax.engine.collect:"
PAGES = "inferjax.engine.pages:SequencePages."
POOL = "inferjax.kv.pool:PagePool."
SCHEDULER = "inferjax.engine.scheduler:Scheduler."
SLOTS = "inferjax.runtime.slots:"
STEPS = "inferjax.runtime.steps:"
TEXT = "inferjax.engine.text:TextStream."


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`old`, which is in the source of `target` once, becomes `new`.

    seen: an issue or pull request about a bug of the same family.
    check, args: a test of the default run that must then fail, "file.function", and its arguments.
    programs: compiled functions that call the target and are traced again.
    """

    about: str
    seen: str
    target: str
    old: str
    new: str
    check: str
    args: tuple[Any, ...] = ()
    programs: tuple[str, ...] = ()
