"""What `make gates` compiles, and the registers that each kernel may take.

The table is pairwise as far as a kernel's code depends on its options: target, width, page size,
query rows, features and dtypes. Every kernel must also do without spilling a single byte, and leave
shared memory for two instances on an SM, or one whose heads are wide.
"""

import dataclasses
import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORDED = Path(__file__).with_name("recorded.json")
SOURCES = ("combine.py", "gpu.py", "gpu_extend.py", "gpu_kernel.py", "gpu_targets.py")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A kernel to compile: queries of `batch` rows with `tokens` new tokens each."""

    target: str
    max_registers: int
    batch: int = 32
    tokens: int = 1
    q_per_kv: int = 8
    width: int = 128
    page_size: int = 64
    dtype: str = "bfloat16"
    pool_dtype: str | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def name(self) -> str:
        """Return the point's options that are not the usual ones."""
        return " ".join(
            [self.target]
            + [
                f"{field.name}={getattr(self, field.name)}"
                for field in dataclasses.fields(self)[2:]
                if getattr(self, field.name) != field.default
            ]
        )


POINTS = (
    Point(target="sm_90", max_registers=88),
    Point(target="sm_90", max_registers=88, width=64, page_size=16, sinks=True),
    Point(target="sm_90", max_registers=96, width=96, page_size=32, softcap=30.0),
    Point(target="sm_90", max_registers=120, width=256, page_size=32, dtype="float16"),
    Point(target="sm_90", max_registers=192, tokens=4, page_size=16, window=1024),
    Point(target="sm_90", max_registers=192, batch=1, tokens=64),
    Point(target="sm_90", max_registers=168, batch=1, tokens=2048),
    Point(target="sm_90", max_registers=168, tokens=512, width=64, page_size=16, sinks=True),
    Point(target="sm_90", max_registers=168, tokens=512, width=96, page_size=32, window=1024),
    Point(
        target="sm_90", max_registers=168, tokens=512, page_size=16, softcap=30.0, dtype="float16"
    ),
    Point(target="sm_90", max_registers=168, pool_dtype="int8"),
    Point(target="sm_90", max_registers=160, pool_dtype="uint8", softcap=30.0, sinks=True),
    Point(target="sm_90", max_registers=144, pool_dtype="int8", width=96, dtype="float16"),
    Point(target="sm_90", max_registers=184, pool_dtype="uint8", width=64, tokens=4),
    Point(target="sm_100", max_registers=88),
    Point(target="sm_100", max_registers=88, width=64, page_size=32, softcap=30.0, sinks=True),
    Point(target="sm_100", max_registers=112, width=96, page_size=16, window=1024),
    Point(target="sm_100", max_registers=120, width=256, dtype="float16", q_per_kv=1),
    Point(target="sm_100", max_registers=200, tokens=4, page_size=32),
    Point(target="sm_100", max_registers=128, pool_dtype="uint8"),
    Point(target="sm_100", max_registers=168, pool_dtype="int8", width=256, window=1024),
    Point(target="sm_80", max_registers=120),
    Point(target="sm_80", max_registers=120, width=64, page_size=32, dtype="float16", window=1024),
    Point(target="sm_80", max_registers=128, width=96, softcap=30.0, sinks=True),
    Point(target="sm_80", max_registers=176, width=256, page_size=16),
    Point(target="sm_80", max_registers=240, tokens=4, page_size=16),
)


def digest() -> str:
    """Return a digest of the sources that the kernels are compiled from."""
    folder = ROOT / "pallas_kernels" / "paged_attention"
    content = b"".join((folder / name).read_bytes() for name in SOURCES)
    return hashlib.sha256(content).hexdigest()[:16]
