"""The most memory that this process has had resident. Needs nothing but Python, like its users."""

import resource
import sys
from pathlib import Path

STATUS = Path("/proc/self/status")


def peak_mb() -> float:
    """Return the peak in MB of 2^20 bytes, without what the parent had.

    Linux lets `ru_maxrss` start at the parent's size, and keeps it when another program is run; its
    `VmHWM` belongs to this program alone.
    """
    if STATUS.exists():
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / (1 << 20 if sys.platform == "darwin" else 1024)
