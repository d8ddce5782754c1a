"""What a product with packed weights may be asked for."""

from jaxtyping import Array, Shaped

from pallas_kernels.quant_matmul.packed import FORMATS, PackedWeight

# What may be rounded on the way in, and for which weights.
ACTIVATIONS = {
    "float32": FORMATS,
    "bfloat16": ("bfloat16",),
    "int8": ("int8", "int4"),
}


def check_product(
    x: Shaped[Array, "..."], weight: PackedWeight, activations: str, *, stacked: bool = False
) -> None:
    """Refuse rows, a weight (or a stack of them) and activations that do not go together.

    Raises: ValueError.
    """
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations are one of {', '.join(ACTIVATIONS)}, not {activations!r}")
    if weight.format not in ACTIVATIONS[activations]:
        raise ValueError(
            f"{activations} activations need weights in {' or '.join(ACTIVATIONS[activations])},"
            f" not {weight.format}"
        )
    if x.ndim < 1 or x.shape[-1] != weight.num_in:
        raise ValueError(f"x has shape {x.shape}, the weight takes rows of {weight.num_in}")
    if weight.values.ndim != (3 if weight.format == "float32" else 4) + stacked:
        number = "a stack of matrices" if stacked else "one matrix"
        raise ValueError(
            f"packed values have shape {weight.values.shape}: {number} is multiplied at a time"
        )
