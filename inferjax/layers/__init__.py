"""The blocks of a decoder as pure functions of arrays and weights."""
