"""Classic faults of inference engines. Each must turn a test of the default run red.

To see which tests notice one: `pytest --mutate NAME`. A fault that none notices is a hole in the
tests.
"""

from fault import Fault
from faults_of_pages import ACCOUNTS, CHUNKS, PREFIX_CACHE, WINDOWS
from faults_of_results import ASYNC, DEVICE, ROWS, SCORES, STREAMS

FAULTS: dict[str, Fault] = (
    PREFIX_CACHE | CHUNKS | WINDOWS | ROWS | SCORES | STREAMS | ACCOUNTS | ASYNC | DEVICE
)
