"""Saves a model: as an Orbax checkpoint, or as Hugging Face's safetensors folder."""

from pathlib import Path

import jax

from inferjax.checkpoint.export import SHARD_BYTES, write_safetensors
from inferjax.checkpoint.load import Model
from inferjax.checkpoint.orbax import write_orbax
from inferjax.checkpoint.replace import replacing, together
from inferjax.errors import UnsupportedConfig
from inferjax.models.params import check_params
from inferjax.models.quantized import check_arrays
from inferjax.params import Params
from inferjax.quant.leaf import is_packed
from inferjax.quant.split import lay_out
from inferjax.tokenizer import save_tokenizer

FORMATS = ("orbax", "safetensors")


def save(
    model: Model,
    path: str | Path,
    *,
    format: str = "orbax",
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: bool = False,
) -> Path:
    """Save config, weights and tokenizer in the folder `path`, which `load` reads.

    "orbax" keeps the weights as they are in memory, packed ones bit for bit, without what a mesh
    makes of them: they are loaded on one device or any other mesh. Where a mesh spans several
    processes all of them call it, and each writes its parts. "safetensors" writes what Hugging Face
    tools load, in files of at most about `shard_bytes`; it has no form for packed weights, which
    are refused: `dequantize` makes arrays of them. An interrupted save leaves what was at `path`.
    Weights from elsewhere go in by `dataclasses.replace(model, params=...)`.

    Raises: CheckpointError if `path` exists without `overwrite`, or cannot be written; ShapeError
      if the weights do not belong to the config; UnsupportedConfig for packed weights as
      safetensors, or safetensors from several processes.
    """
    if format not in FORMATS:
        raise UnsupportedConfig(f"format={format!r}", fix=f"use one of {', '.join(FORMATS)}")
    path = Path(path).expanduser()
    check_params(model.params, model.config)
    if format == "safetensors":
        _check_one_process()
        check_arrays(model.params)
    jax.block_until_ready(model.params)
    with replacing(path, overwrite=overwrite) as folder:
        with together(path):
            if model.tokenizer is not None and jax.process_index() == 0:
                save_tokenizer(model.tokenizer, folder)
        if format == "safetensors":
            write_safetensors(
                folder,
                model.config,
                model.raw,
                model.params,
                shard_bytes=shard_bytes,
                progress=progress,
            )
        else:
            write_orbax(folder, model.config, model.raw, _merged(model.params))
    return path


def _check_one_process() -> None:
    if jax.process_count() > 1:
        raise UnsupportedConfig(
            f"format='safetensors' from {jax.process_count()} processes",
            why="its files hold whole weights, of which each process has a part",
            fix="save as orbax; then one process loads that and saves it as safetensors",
        )


def _merged(params: Params) -> Params:
    """Return packed weights in the one layout that a record describes, wherever they lie."""
    return jax.tree.map(
        lambda leaf: lay_out(leaf, None) if is_packed(leaf) else leaf, params, is_leaf=is_packed
    )
