"""The only place with tolerances: one name an operation and dtype, each with its reason.

A tolerance is never loosened in the change that makes a test pass.
"""

# Softmax and two dot products of a few dozen float32 terms of order one.
ATTENTION_F32 = {"rtol": 2e-5, "atol": 2e-6}

# The same, rounded to bfloat16 at the end: half a unit of its 8 bits.
ATTENTION_BF16 = {"rtol": 2**-8, "atol": 2e-6}

# The same with weights rounded before they are multiplied with values, as tensor cores want them:
# half a unit of 8 bits of each, values up to four.
ATTENTION_BF16_WEIGHTS = {"rtol": 2**-8, "atol": 2**-7}

# A dot product of a few dozen float32 terms of order one.
MATMUL_F32 = {"rtol": 2e-5, "atol": 2e-5}

# Logits against Hugging Face's float32, as a share of the logits' standard deviation: the project's
# promise for every family.
PARITY_LOGITS_F32 = 1e-4

# Log-probabilities of two float32 computations that sum in different orders.
LOGPROBS_F32 = {"rtol": 0, "atol": 2e-5}

# Log-probabilities of a real model against Hugging Face's float32: 30 layers of rounding.
GOLDEN_LOGPROBS_F32 = {"rtol": 0, "atol": 2e-3}

# Log-probability margin of the reference below which its own rounding may decide a greedy token.
GOLDEN_TIE_MARGIN = 1e-3

# Logits of two float32 computations that sum in different orders. Their standard deviation is 2
# to 9 in the tiny models: at most half of what parity allows.
LOGITS_F32 = {"rtol": 0, "atol": 1e-4}

# A float32 gradient against differences of fourth order: the loss carries 2e-6 of rounding, which a
# step of 4e-3 magnifies; seen up to 1e-3 of the slope. The floor is a share of the whole gradient.
FINITE_DIFFERENCES_F32 = {"rtol": 5e-3, "atol": 1e-3}

# Gradients of one float32 program summed in different orders, as shares of a leaf's largest value.
CHUNKED_GRADIENTS_F32 = {"rtol": 0, "atol": 1e-4}

# Logits of bfloat16 weights and activations against float32, root mean square, as a share of the
# logits' standard deviation: 8 bits (0.4 %) in each of a dozen roundings; an expert may change.
BFLOAT16_LOGITS = 0.05

# Log-probabilities of the tiny models by two routes: moving half of gpt_oss's embedding by one bit
# moves them by 5e-5, and each route rounds thousands of times.
TINY_LOGPROBS_F32 = {"rtol": 0, "atol": 1e-4}

# Weights rounded to bfloat16 (8 bits) or to blocks of 8-bit numbers with a scale in 11 bits, as a
# share of a tensor's largest value: half a step of 1 / 127, and half of 2^-11 in the scale.
GGUF_ROUNDING = 0.005

# Products with packed weights, as a share of the sum of the terms' magnitudes: chains of at most
# 256 float32 terms; seen up to 2.5e-7.
QUANT_MATMUL_F32 = 1e-6

# The same with rounded activations: bfloat16 keeps 8 bits; int8 rounds to half of 1/127 of the
# largest value of a group, which is up to four times a typical one.
QUANT_MATMUL_ROUNDED = {"bfloat16": 2**-8, "int8": 0.02}

# Logits on packed weights, root mean square as a share of the logits' standard deviation: against
# their float32 values, or on a mesh, they are the same sums in other orders. Single positions move
# further: 3e-4 in gpt_oss, which noise in the last bit of its weights moves by 1.6e-4.
PACKED_LOGITS_RMS = 1e-5
