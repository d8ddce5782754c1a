"""The only place with tolerances: one name an operation and dtype, each with its reason.

A tolerance is never loosened in the change that makes a test pass.
"""

# Softmax and two dot products of a few dozen float32 terms of order one.
ATTENTION_F32 = {"rtol": 2e-5, "atol": 2e-6}

# A dot product of a few dozen float32 terms of order one.
MATMUL_F32 = {"rtol": 2e-5, "atol": 2e-5}

# Logits against Hugging Face's float32, as a share of the logits' standard deviation: the project's
# promise for every family.
PARITY_LOGITS_F32 = 1e-4

# Log-probabilities of two float32 computations that sum in different orders.
LOGPROBS_F32 = {"rtol": 0, "atol": 2e-5}

# Log-probabilities of a real model against Hugging Face's float32: 30 layers of rounding.
GOLDEN_LOGPROBS_F32 = {"rtol": 0, "atol": 2e-3}
