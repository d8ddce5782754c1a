"""GPUs that a program can be compiled for without one, as XLA wants them described."""

import jax
import numpy as np
from jax.experimental import topologies

DESCRIPTION = """gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared_memory_per_core}
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {l2_cache}
  clock_rate_ghz: {clock}
  device_memory_size: {memory}
  shared_memory_per_block_optin: {shared_memory}
  cuda_compute_capability {{ major: {major} minor: 0 }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""

GPUS = {
    "sm_80": {
        "name": "NVIDIA A100-SXM4-80GB",
        "major": 8,
        "cores": 108,
        "shared_memory_per_core": 167_936,
        "shared_memory": 166_912,
        "bandwidth": 2_039_000_000_000,
        "l2_cache": 41_943_040,
        "clock": 1.41,
        "memory": 84_987_740_160,
    },
    "sm_90": {
        "name": "NVIDIA H200",
        "major": 9,
        "cores": 132,
        "shared_memory_per_core": 233_472,
        "shared_memory": 232_448,
        "bandwidth": 4_800_000_000_000,
        "l2_cache": 52_428_800,
        "clock": 1.98,
        "memory": 150_754_820_096,
    },
    "sm_100": {
        "name": "NVIDIA B200",
        "major": 10,
        "cores": 148,
        "shared_memory_per_core": 233_472,
        "shared_memory": 232_448,
        "bandwidth": 8_000_000_000_000,
        "l2_cache": 132_644_864,
        "clock": 1.965,
        "memory": 191_503_138_816,
    },
}


def sharding(target: str) -> jax.sharding.Sharding:
    """Return where arrays lie on one such GPU."""
    description = topologies.get_topology_desc(
        platform="cuda",
        topology_name=f"{target}_1",
        target_config=DESCRIPTION.format(**GPUS[target]),
        topology="1x1x1",
    )
    mesh = jax.sharding.Mesh(np.array(description.devices), ("all",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
