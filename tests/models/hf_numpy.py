"""The five families in plain float64 NumPy, on tensors as Hugging Face names and lays them out.

Slow and obvious, one sequence at a time. It is itself checked against the logits of Hugging Face.
"""

import math

import numpy as np
from scipy.special import erf

from inferjax.layers.rope import inverse_frequencies


def numpy_logits(raw, config, w, tokens):
    """Return the logits [T, V] of one sequence; `config` only serves the rope frequencies."""
    ropes = [getattr(spec.attention, "rope", None) for spec in config.layers]
    run = {"gpt2": gpt2, "deepseek_v3": deepseek, "gpt_oss": gpt_oss, "gemma3_text": gemma}
    return run.get(raw["model_type"], llama)(
        raw, {k: np.float64(v) for k, v in w.items()}, tokens, ropes
    )


def llama(raw, w, tokens, ropes):
    x = w["model.embed_tokens.weight"][tokens]
    for i, rope in enumerate(ropes):
        name = f"model.layers.{i}"
        y = rms(x, w[f"{name}.input_layernorm.weight"], raw)
        x = x + grouped(raw, w, f"{name}.self_attn", y, rope, raw.get("head_dim") or 16)
        y = rms(x, w[f"{name}.post_attention_layernorm.weight"], raw)
        x = x + gated(w, f"{name}.mlp", y, raw["hidden_act"])
    return head(raw, w, rms(x, w["model.norm.weight"], raw))


def gemma(raw, w, tokens, ropes):
    x = w["model.embed_tokens.weight"][tokens] * math.sqrt(raw["hidden_size"])
    for i, rope in enumerate(ropes):
        name = f"model.layers.{i}"

        def norm(part, y, name=name):
            return rms(y, 1 + w[f"{name}.{part}.weight"], raw)

        slides = (i + 1) % raw["sliding_window_pattern"]
        y = grouped(
            raw,
            w,
            f"{name}.self_attn",
            norm("input_layernorm", x),
            rope,
            raw["query_pre_attn_scalar"],
            window=raw["sliding_window"] if slides else None,
            qk_norm=True,
        )
        x = x + norm("post_attention_layernorm", y)
        y = gated(w, f"{name}.mlp", norm("pre_feedforward_layernorm", x), raw["hidden_activation"])
        x = x + norm("post_feedforward_layernorm", y)
    logits = head(raw, w, rms(x, 1 + w["model.norm.weight"], raw))
    cap = raw["final_logit_softcapping"]
    return logits if cap is None else cap * np.tanh(logits / cap)


def gpt_oss(raw, w, tokens, ropes):
    x = w["model.embed_tokens.weight"][tokens]
    for i, rope in enumerate(ropes):
        name = f"model.layers.{i}"
        y = rms(x, w[f"{name}.input_layernorm.weight"], raw)
        window = raw["sliding_window"] if raw["layer_types"][i] == "sliding_attention" else None
        x = x + grouped(
            raw,
            w,
            f"{name}.self_attn",
            y,
            rope,
            raw["head_dim"],
            window=window,
            sinks=w[f"{name}.self_attn.sinks"],
        )
        y = rms(x, w[f"{name}.post_attention_layernorm.weight"], raw)
        x = x + np.stack([clamped_experts(raw, w, f"{name}.mlp", row) for row in y])
    return head(raw, w, rms(x, w["model.norm.weight"], raw))


def clamped_experts(raw, w, name, row):
    scores = linear(w, f"{name}.router", row)
    chosen = np.argsort(-scores)[: raw["num_experts_per_tok"]]
    out = 0
    for expert, share in zip(chosen, softmax(scores[chosen]), strict=True):
        part = f"{name}.experts"
        both = row @ w[f"{part}.gate_up_proj"][expert] + w[f"{part}.gate_up_proj_bias"][expert]
        limit = raw["swiglu_limit"]
        gate, up = np.minimum(both[::2], limit), np.clip(both[1::2], -limit, limit)
        y = (up + 1) * gate / (1 + np.exp(-raw["swiglu_alpha"] * gate))
        out = out + share * (
            y @ w[f"{part}.down_proj"][expert] + w[f"{part}.down_proj_bias"][expert]
        )
    return out


def deepseek(raw, w, tokens, ropes):
    x = w["model.embed_tokens.weight"][tokens]
    for i, rope in enumerate(ropes):
        name = f"model.layers.{i}"
        y = rms(x, w[f"{name}.input_layernorm.weight"], raw)
        x = x + latent(raw, w, f"{name}.self_attn", y, rope)
        y = rms(x, w[f"{name}.post_attention_layernorm.weight"], raw)
        if i < raw["first_k_dense_replace"]:
            x = x + gated(w, f"{name}.mlp", y, raw["hidden_act"])
        else:
            x = x + np.stack([grouped_experts(raw, w, f"{name}.mlp", row) for row in y])
    return head(raw, w, rms(x, w["model.norm.weight"], raw))


def latent(raw, w, name, x, rope):
    heads, nope, rank = raw["num_attention_heads"], raw["qk_nope_head_dim"], raw["kv_lora_rank"]
    if raw["q_lora_rank"] is None:
        q = linear(w, f"{name}.q_proj", x)
    else:
        low = linear(w, f"{name}.q_a_proj", x)
        low = rms(low, w[f"{name}.q_a_layernorm.weight"], {"rms_norm_eps": 1e-6})
        q = linear(w, f"{name}.q_b_proj", low)
    q = q.reshape(len(x), heads, -1)
    down = linear(w, f"{name}.kv_a_proj_with_mqa", x)
    kv = rms(down[:, :rank], w[f"{name}.kv_a_layernorm.weight"], {"rms_norm_eps": 1e-6})
    kv = linear(w, f"{name}.kv_b_proj", kv).reshape(len(x), heads, -1)
    pairs = raw["rope_interleave"]
    q = np.concatenate([q[..., :nope], rotate(q[..., nope:], rope, pairs)], -1)
    key = rotate(down[:, None, rank:], rope, pairs).repeat(heads, 1)
    k = np.concatenate([kv[..., :nope], key], -1)
    scale = q.shape[-1] ** -0.5
    settings = raw["rope_scaling"] or {}
    if settings.get("mscale_all_dim"):
        scale *= (0.1 * settings["mscale_all_dim"] * math.log(settings["factor"]) + 1) ** 2
    out = attend(q, k, kv[..., nope:], scale)
    return linear(w, f"{name}.o_proj", out.reshape(len(x), -1))


def grouped_experts(raw, w, name, row):
    scores = 1 / (1 + np.exp(-linear(w, f"{name}.gate", row)))
    choice = (scores + w[f"{name}.gate.e_score_correction_bias"]).reshape(raw["n_group"], -1)
    best = np.argsort(-np.sort(choice, 1)[:, -2:].sum(1))[: raw["topk_group"]]
    kept = np.full_like(choice, -np.inf)
    kept[best] = choice[best]
    chosen = np.argsort(-kept.reshape(-1))[: raw["num_experts_per_tok"]]
    shares = scores[chosen] / (scores[chosen].sum() if raw["norm_topk_prob"] else 1)
    out = gated(w, f"{name}.shared_experts", row, raw["hidden_act"])
    for expert, share in zip(chosen, shares * raw["routed_scaling_factor"], strict=True):
        out = out + share * gated(w, f"{name}.experts.{expert}", row, raw["hidden_act"])
    return out


def gpt2(raw, w, tokens, ropes):
    act = ACTIVATIONS[raw["activation_function"]]

    def norm(name, x):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + raw["layer_norm_epsilon"])
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def conv(name, x):
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    heads = raw["n_head"]
    x = w["transformer.wte.weight"][tokens] + w["transformer.wpe.weight"][: len(tokens)]
    for i in range(len(ropes)):
        name = f"transformer.h.{i}"
        qkv = np.split(conv(f"{name}.attn.c_attn", norm(f"{name}.ln_1", x)), 3, -1)
        q, k, v = (part.reshape(len(x), heads, -1) for part in qkv)
        scale = q.shape[-1] ** -0.5 / (i + 1 if raw["scale_attn_by_inverse_layer_idx"] else 1)
        x = x + conv(f"{name}.attn.c_proj", attend(q, k, v, scale).reshape(len(x), -1))
        y = act(conv(f"{name}.mlp.c_fc", norm(f"{name}.ln_2", x)))
        x = x + conv(f"{name}.mlp.c_proj", y)
    table = "transformer.wte.weight" if raw["tie_word_embeddings"] else "lm_head.weight"
    return norm("transformer.ln_f", x) @ w[table].T


def grouped(raw, w, name, x, rope, scale_dim, *, window=None, sinks=None, qk_norm=False):
    heads, kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
    q = linear(w, f"{name}.q_proj", x).reshape(len(x), heads, -1)
    k, v = (linear(w, f"{name}.{p}_proj", x).reshape(len(x), kv_heads, -1) for p in "kv")
    if qk_norm:
        q, k = (rms(a, 1 + w[f"{name}.{p}_norm.weight"], raw) for a, p in ((q, "q"), (k, "k")))
    q, k = rotate(q, rope), rotate(k, rope)
    k, v = (a.repeat(heads // kv_heads, 1) for a in (k, v))
    out = attend(q, k, v, scale_dim**-0.5, window, sinks)
    return linear(w, f"{name}.o_proj", out.reshape(len(x), -1))


def attend(q, k, v, scale, window=None, sinks=None):
    scores = np.einsum("TNH,SNH->NTS", q, k) * scale
    distance = np.arange(len(q))[:, None] - np.arange(len(k))[None]
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    scores = np.where(hidden, -np.inf, scores)
    if sinks is not None:
        extra = np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
        return np.einsum("NTS,SNH->TNH", softmax(np.concatenate([scores, extra], -1))[..., :-1], v)
    return np.einsum("NTS,SNH->TNH", softmax(scores), v)


def rotate(x, rope, pairs=False):
    frequencies, factor = inverse_frequencies(rope)
    turn = factor * np.exp(1j * np.arange(len(x))[:, None, None] * np.float64(frequencies))
    half = x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if pairs else (x[..., :half], x[..., half:])
    turned = (first + 1j * second) * turn
    return np.concatenate([turned.real, turned.imag], -1)


def linear(w, name, x):
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)


def gated(w, name, x, activation):
    gate, up = (linear(w, f"{name}.{part}_proj", x) for part in ("gate", "up"))
    return linear(w, f"{name}.down_proj", ACTIVATIONS[activation](gate) * up)


def head(raw, w, x):
    return x @ w["model.embed_tokens.weight" if raw["tie_word_embeddings"] else "lm_head.weight"].T


def rms(x, weight, raw):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + raw["rms_norm_eps"]) * weight


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))),
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": lambda x: np.maximum(x, 0),
}
