"""The run-time type checker that conftest hooks into the package."""

from typing import Any

from beartype import BeartypeConf, beartype

# An int is fine where a float is asked for, as for a static type checker.
_check = beartype(conf=BeartypeConf(is_pep484_tower=True))

# These classes are annotated for their users and check what they are given themselves: their typed
# errors are what is tested.
ENTRANCES = ("Engine.",)


def check(function: Any) -> Any:
    """Return the function with its annotations checked, unless it is an entrance."""
    return function if function.__qualname__.startswith(ENTRANCES) else _check(function)
