"""What tokens cost in money and energy, at the floor of their time."""


def dollars_per_million(price_per_chip_hour: float, num_chips: int, tok_s: float) -> float:
    """Return the price of a million tokens that `num_chips` make at this rate."""
    return price_per_chip_hour * num_chips / 3600 / tok_s * 1e6


def joules_per_token(watts: float, num_chips: int, tok_s: float) -> float:
    """Return the energy of a token when every chip draws `watts`."""
    return watts * num_chips / tok_s
