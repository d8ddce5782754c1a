"""The tests that must notice a fault are those of other folders."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
for folder in ("engine", "equivalence", "oracle", "runtime"):
    sys.path.append(str(TESTS / folder))
