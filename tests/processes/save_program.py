"""What each rank runs: load over all devices, save, and restore onto another mesh.

Arguments: folder to save in, "none" or a scheme, and "whole", "killed" for a rank 1 that kills
itself in the middle of saving, or "full" for a disk that has no room for rank 0 the first time.
"""

import errno
import os
import signal
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType
from tiny_models import TINY

import inferjax as ij
from inferjax.checkpoint import replace


def kill_while_saving(path: Path) -> None:
    while not list(path.parent.glob(f".{path.name}.saving-*/params*")):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


def save_on_a_full_disk(model: ij.Model, path: Path) -> None:
    """Fail in the first rank only, and go on in all."""
    sync = replace._sync

    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "no room")

    replace._sync = full
    try:
        ij.save(model, path, overwrite=True)
    except ij.InferjaxError as error:
        print("refused in", jax.process_index(), error.why)
    replace._sync = sync


def mesh_of(data: int) -> jax.sharding.Mesh:
    shape = (data, jax.device_count() // data)
    return jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def main() -> None:
    path, scheme, how = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    quantize = None if scheme == "none" else scheme
    model = ij.load(TINY / "llama", quantize=quantize, mesh=mesh_of(1))
    if how == "killed" and jax.process_index() == 1:
        threading.Thread(target=kill_while_saving, args=(path,), daemon=True).start()
    if how == "full":
        return save_on_a_full_disk(model, path)
    ij.save(model, path, overwrite=True)
    try:
        ij.save(model, path, format="safetensors", overwrite=True)
    except ij.InferjaxError as error:
        print(error.what)
    mesh = mesh_of(2)
    want = ij.load(TINY / "llama", quantize=quantize, mesh=mesh)
    again = ij.load(path, mesh=mesh)
    for ours, theirs in zip(
        jax.tree.leaves(again.params), jax.tree.leaves(want.params), strict=True
    ):
        for one, other in zip(ours.addressable_shards, theirs.addressable_shards, strict=True):
            np.testing.assert_array_equal(one.data, other.data)
    print("restored in", jax.process_index())


if __name__ == "__main__":
    main()
