"""The chips that plans are made for, by name: what their makers say they do at best.

Rates are dense ones, without structured sparsity. A gigabyte is 1e9 bytes, also of memory, where
drivers often show up to 7 % more. A chip that is not in the table, such as the machine that plans,
is a `Chip` made of measured values.

Source: the data sheets and pages named in each row; start of a collective and time per hop of
NVLink, PCIe and InfiniBand: the constants of NCCL's own cost model (src/graph/tuning.cc, 2.28:
protocol LL); of TPUs: jax-ml/scaling-book, which also has their links and networks.
"""

import dataclasses
from typing import Literal

from inferjax.errors import UnknownChip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How `num_chips` chips reach each other.

    `bytes_s` is what a chip sends while it receives as much, over all the wires that one collective
    uses: of a torus those of one axis, in both directions. `start_s` is what every collective
    costs, `hop_s` what each step of it adds.
    """

    kind: Literal["switch", "torus", "ring"]
    num_chips: int
    bytes_s: float
    start_s: float
    hop_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What steps of `rows` tokens were measured to do.

    `product_bytes_s` of weights are multiplied with the rows in a second, `kv_bytes_s` of keys and
    values attended to, and `step_s` is what a step takes beside both.
    """

    rows: int
    product_bytes_s: float
    kv_bytes_s: float
    step_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """What one chip does at best.

    `network` joins what `link` does not. `watts` is the thermal design power, None where the maker
    does not tell. `f32_flops` is what XLA computes float32 products with by default (TF32 on
    NVIDIA's chips, one bfloat16 pass on TPUs). `fp8_flops` is None without such units.

    `measured` are steps of a machine that was measured, by rising `rows`: they stand for its
    bandwidth and arithmetic, and nothing overlaps there.
    """

    name: str
    memory_bytes: float
    bandwidth: float
    bf16_flops: float
    f32_flops: float
    int8_flops: float
    fp8_flops: float | None = None
    link: Link
    network: Link
    watts: float | None = None
    source: str
    measured: tuple[Measured, ...] = ()


_START_S = 6.6e-6


def _switch(bytes_s: float, num_chips: int = 8) -> Link:
    """NVLink through NVSwitch: everybody is one hop away."""
    return Link(kind="switch", num_chips=num_chips, bytes_s=bytes_s, start_s=_START_S, hop_s=0.6e-6)


def _pcie(bytes_s: float, num_chips: int) -> Link:
    """PCIe through the host."""
    return Link(kind="ring", num_chips=num_chips, bytes_s=bytes_s, start_s=_START_S, hop_s=1.0e-6)


def _infiniband(bytes_s: float) -> Link:
    return Link(kind="ring", num_chips=65_536, bytes_s=bytes_s, start_s=_START_S, hop_s=2.7e-6)


def _ici(one_way_bytes_s: float, num_chips: int) -> Link:
    """One axis of the torus, both directions."""
    return Link(
        kind="torus", num_chips=num_chips, bytes_s=2 * one_way_bytes_s, start_s=0.0, hop_s=1e-6
    )


def _dcn(bytes_s: float) -> Link:
    """The data centre's network between TPU slices."""
    return Link(kind="ring", num_chips=65_536, bytes_s=bytes_s, start_s=0.0, hop_s=10e-6)


_A100 = {
    "bf16_flops": 312e12,
    "f32_flops": 156e12,
    "int8_flops": 624e12,
    "link": _switch(300e9),
    "network": _infiniband(25e9),
    "watts": 400.0,
    "source": "NVIDIA A100 Tensor Core GPU data sheet (2021), SXM; DGX A100: 200 Gb/s per GPU",
}
_H100 = {
    "bf16_flops": 989.4e12,
    "f32_flops": 494.7e12,
    "int8_flops": 1978.9e12,
    "fp8_flops": 1978.9e12,
    "link": _switch(450e9),
    "network": _infiniband(50e9),
    "watts": 700.0,
}

# The rows people ask for; `source` says where the numbers are from.
_ROWS: tuple[Chip, ...] = (
    Chip(name="a100-40gb", memory_bytes=40e9, bandwidth=1.555e12, **_A100),
    Chip(name="a100", memory_bytes=80e9, bandwidth=2.039e12, **_A100),
    Chip(
        name="h100",
        memory_bytes=80e9,
        bandwidth=3.35e12,
        source="NVIDIA H100 data sheet, SXM5 (half of its rates with sparsity); DGX H100: 400 Gb/s "
        "per GPU",
        **_H100,
    ),
    Chip(
        name="h100-pcie",
        memory_bytes=80e9,
        bandwidth=2.0e12,
        bf16_flops=756e12,
        f32_flops=378e12,
        int8_flops=1513e12,
        fp8_flops=1513e12,
        # An NVLink bridge joins two cards only; more go through the host.
        link=_pcie(64e9, 8),
        network=_infiniband(25e9),
        watts=350.0,
        source="NVIDIA H100 data sheet, PCIe (half of its rates with sparsity); PCIe 5.0 x16",
    ),
    Chip(
        name="h200",
        memory_bytes=141e9,
        bandwidth=4.8e12,
        source="NVIDIA H200 data sheet, SXM (half of its rates with sparsity)",
        **_H100,
    ),
    Chip(
        name="b200",
        memory_bytes=180e9,
        bandwidth=7.7e12,
        bf16_flops=2250e12,
        f32_flops=1125e12,
        int8_flops=4500e12,
        fp8_flops=4500e12,
        link=_switch(900e9),
        network=_infiniband(50e9),
        watts=1000.0,
        source="NVIDIA HGX B200 and DGX B200 data sheets, one of eight (half of rates with "
        "sparsity)",
    ),
    Chip(
        name="l4",
        memory_bytes=24e9,
        bandwidth=300e9,
        bf16_flops=121e12,
        f32_flops=60e12,
        int8_flops=242.5e12,
        fp8_flops=242.5e12,
        link=_pcie(32e9, 8),
        network=_infiniband(12.5e9),
        watts=72.0,
        source="NVIDIA L4 data sheet (half of its rates with sparsity); PCIe 4.0 x16",
    ),
    Chip(
        name="rtx-4090",
        memory_bytes=24e9,
        bandwidth=1.008e12,
        bf16_flops=165.2e12,
        f32_flops=82.6e12,
        int8_flops=660.6e12,
        fp8_flops=330.3e12,
        link=_pcie(32e9, 8),
        network=_infiniband(12.5e9),
        watts=450.0,
        source="NVIDIA Ada GPU architecture white paper, appendix A (float32 sums); PCIe 4.0 x16",
    ),
    Chip(
        name="tpu-v5e",
        memory_bytes=16e9,
        bandwidth=819e9,
        bf16_flops=197e12,
        f32_flops=197e12,
        int8_flops=393e12,
        link=_ici(45e9, 256),
        network=_dcn(3.125e9),
        source="Google Cloud, TPU v5e; jax-ml/scaling-book, chapter 2",
    ),
    Chip(
        name="tpu-v5p",
        memory_bytes=95e9,
        bandwidth=2.765e12,
        bf16_flops=459e12,
        f32_flops=459e12,
        int8_flops=918e12,
        link=_ici(90e9, 8_960),
        network=_dcn(6.25e9),
        source="Google Cloud, TPU v5p; jax-ml/scaling-book, chapter 2",
    ),
    Chip(
        name="tpu-v6e",
        memory_bytes=32e9,
        bandwidth=1.638e12,
        bf16_flops=918e12,
        f32_flops=918e12,
        int8_flops=1836e12,
        link=_ici(90e9, 256),
        network=_dcn(12.5e9),
        source="Google Cloud, TPU v6e; jax-ml/scaling-book, chapter 2",
    ),
)
CHIPS: dict[str, Chip] = {chip.name: chip for chip in _ROWS}

# Other names for the same rows.
ALIASES = {
    "a100-80gb": "a100",
    "h100-sxm": "h100",
    "h200-sxm": "h200",
    "4090": "rtx-4090",
    "rtx4090": "rtx-4090",
    "v5e": "tpu-v5e",
    "v5p": "tpu-v5p",
    "v6e": "tpu-v6e",
}


def chip_named(name: str) -> Chip:
    """Return a chip of the table.

    Raises: UnknownChip listing the known ones.
    """
    key = name.lower().replace("_", "-")
    key = ALIASES.get(key, key)
    if key not in CHIPS:
        raise UnknownChip(
            f"no chip is called {name[:40]!r}",
            why="its memory, bandwidth and arithmetic are not in the table",
            fix=f"use one of {', '.join(CHIPS)}; or `local`, which measures this machine",
            known=tuple(CHIPS),
        )
    return CHIPS[key]


def measured_chip(
    *,
    memory_bytes: float,
    bandwidth: float,
    flops: float,
    measured: tuple[Measured, ...] = (),
    watts: float | None = None,
) -> Chip:
    """Return the machine that plans, as it was measured; it counts as one chip."""
    alone = Link(kind="ring", num_chips=1, bytes_s=bandwidth, start_s=0.0, hop_s=0.0)
    return Chip(
        name="local",
        memory_bytes=memory_bytes,
        bandwidth=bandwidth,
        bf16_flops=flops,
        f32_flops=flops,
        int8_flops=flops,
        link=alone,
        network=alone,
        watts=watts,
        source="measured on this machine",
        measured=tuple(sorted(measured, key=lambda steps: steps.rows)),
    )
