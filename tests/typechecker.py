"""The run-time type checker that conftest hooks into the package."""

from beartype import BeartypeConf, beartype

# An int is fine where a float is asked for, as for a static type checker.
check = beartype(conf=BeartypeConf(is_pep484_tower=True))
