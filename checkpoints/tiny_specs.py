"""What the tiny reference checkpoints are: classes of transformers, settings, and layouts."""

import math
from dataclasses import dataclass, field

VOCAB, CONTEXT, LENGTH, PROMPT, NEW = 320, 256, 40, 12, 24
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Spec:
    """One checkpoint: a class of transformers, its settings, and how the folder is laid out."""

    model: str
    config: dict
    old: bool = False  # config.json as transformers 4 wrote it
    kind: str = "causal"  # or "classifier", "embedding"
    dtype: str = "bfloat16"
    edits: dict = field(default_factory=dict)  # laid over config.json
    teeth: tuple[dict, ...] = ()  # settings (dotted paths) that must change the result
    strip: str = ""  # a prefix that hub checkpoints of this kind leave out
    scaling_key: str = "rope_type"  # the old style's name for the kind of RoPE scaling
    masks: bool = False  # store the attention masks that old checkpoints carry
    pooling: str = ""
    normalize: bool = False


BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
DENSE = BASE | {"num_key_value_heads": 2, "intermediate_size": 112}
HEAD = {"head_dim": 16}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
YARN_OLMO = YARN | {"attention_factor": 0.1 * math.log(8.0) + 1.0}
MLA = BASE | {
    "num_key_value_heads": 4,
    "intermediate_size": 112,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "norm_topk_prob": False,
}
MLA_HUB = {
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "moe_layer_freq": 1,
    "scoring_func": "softmax",
    "seq_aux": True,
}
OPT = BASE | {
    "ffn_dim": 256,
    "bos_token_id": 2,
    "pad_token_id": 1,
    "dropout": 0.0,
    "activation_function": "relu",
}
WINDOW_9 = {"sliding_window": 9}


def rope(theta: float, **others: object) -> dict:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta} | others}


def by_kind(full: dict, sliding: dict) -> dict:
    return {"rope_parameters": {FULL: full, SLIDING: sliding}}


def families() -> dict[str, Spec]:
    """List the plain configuration of each family."""
    plain = {"rope_type": "default", "rope_theta": 500000.0}
    return {
        "qwen2_moe": Spec(
            "Qwen2MoeForCausalLM",
            DENSE
            | rope(1000000.0)
            | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
            | {"shared_expert_intermediate_size": 80, "mlp_only_layers": [1]},
            old=True,
            edits={"sliding_window": 8, "max_window_layers": 1},
            teeth=({"norm_topk_prob": True}, {"num_experts_per_tok": 2}),
        ),
        "olmo3": Spec(
            "Olmo3ForCausalLM",
            DENSE | by_kind(plain, plain) | {"num_hidden_layers": 4, "sliding_window": 8},
            teeth=(WINDOW_9, {"layer_types": [FULL] * 4}, {"layer_types": [SLIDING] * 4}),
        ),
        "starcoder2": Spec(
            "Starcoder2ForCausalLM",
            DENSE | rope(100000.0) | {"use_bias": True},
            old=True,
            teeth=({"rope_parameters.rope_theta": 10000.0}, {"use_bias": False}),
        ),
        "glm4": Spec(
            "Glm4ForCausalLM",
            DENSE
            | HEAD
            | rope(10000.0, partial_rotary_factor=0.5)
            | {"attention_bias": False, "eos_token_id": [2, 3, 4]},
            old=True,
            teeth=({"rope_parameters.partial_rotary_factor": 1.0},),
        ),
        "stablelm": Spec(
            "StableLmForCausalLM",
            DENSE | rope(10000.0, partial_rotary_factor=0.25) | {"use_qkv_bias": True},
            old=True,
            teeth=({"use_parallel_residual": True}, {"use_qkv_bias": False}),
        ),
        "cohere": Spec(
            "CohereForCausalLM",
            DENSE | rope(8000000.0) | {"logit_scale": 0.0625},
            old=True,
            teeth=({"logit_scale": 0.07}, {"rope_parameters.rope_theta": 10000.0}),
        ),
        "opt": Spec(
            "OPTForCausalLM",
            OPT,
            old=True,
            dtype="float16",
            teeth=({"do_layer_norm_before": False}, {"activation_function": "gelu"}),
        ),
        "deepseek_v2": Spec(
            "DeepseekV2ForCausalLM",
            MLA
            | rope(10000.0)
            | {"q_lora_rank": 24, "topk_method": "group_limited_greedy", "n_group": 4}
            | {"topk_group": 2, "routed_scaling_factor": 4.0},
            teeth=({"topk_method": "greedy"}, {"topk_group": 3}, {"routed_scaling_factor": 1.0}),
        ),
    }


def residual_variants() -> dict[str, Spec]:
    """List variants of norms, residual streams and projections."""
    return {
        "deepseek_v2_lite": Spec(
            "DeepseekV2ForCausalLM",
            MLA
            | {
                "q_lora_rank": None,
                "topk_method": "greedy",
                "n_group": 1,
                "topk_group": 1,
                "rope_parameters": YARN
                | {"rope_theta": 10000.0, "mscale": 0.707, "mscale_all_dim": 0.707},
            },
            old=True,
            edits=MLA_HUB,
            scaling_key="type",
            teeth=({"rope_parameters.mscale_all_dim": 0.0}, {"rope_parameters.factor": 16.0}),
        ),
        "gpt_neox_serial": Spec(
            "GPTNeoXForCausalLM",
            BASE
            | rope(10000.0, partial_rotary_factor=0.25)
            | {"intermediate_size": 256, "use_parallel_residual": False},
            dtype="float16",
            masks=True,
            teeth=({"use_parallel_residual": True}, {"rope_parameters.rope_theta": 100.0}),
        ),
        "stablelm_parallel": Spec(
            "StableLmForCausalLM",
            DENSE
            | rope(10000.0, partial_rotary_factor=0.25)
            | {"use_parallel_residual": True, "qk_layernorm": True},
            teeth=({"use_parallel_residual": False}, {"qk_layernorm": False}),
        ),
        "cohere_qk_norm": Spec(
            "CohereForCausalLM",
            DENSE | rope(75000000.0) | {"logit_scale": 0.8333333, "use_qk_norm": True},
            teeth=({"use_qk_norm": False}, {"rope_parameters.rope_theta": 10000.0}),
        ),
        "opt_post_norm": Spec(
            "OPTForCausalLM",
            OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 32},
            dtype="float16",
            strip="model.",
            teeth=({"do_layer_norm_before": True},),
        ),
        "glm4_bias": Spec(
            "Glm4ForCausalLM",
            DENSE
            | HEAD
            | rope(10000.0, partial_rotary_factor=0.5)
            | {"attention_bias": True, "eos_token_id": [2, 3, 4]},
            teeth=({"attention_bias": False},),
        ),
        "phi3_longrope": Spec(
            "Phi3ForCausalLM",
            DENSE
            | rope(
                10000.0,
                rope_type="longrope",
                partial_rotary_factor=0.75,
                original_max_position_embeddings=8,
                short_factor=[1.0, 1.1, 1.25, 1.4, 1.7, 2.0],
                long_factor=[1.2, 2.0, 3.5, 7.0, 14.0, 30.0],
            )
            | {"original_max_position_embeddings": 8, "sliding_window": 262144},
            old=True,
            scaling_key="type",
            teeth=(
                {"original_max_position_embeddings": 128},
                {"rope_parameters.long_factor": [1.0, 1.1, 1.25, 1.4, 1.7, 2.0]},
            ),
        ),
    }


def window_variants() -> dict[str, Spec]:
    """List variants with sliding windows shorter than the test data."""
    plain = {"rope_type": "default", "rope_theta": 500000.0}
    first_full = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8}
    return {
        "olmo3_yarn": Spec(
            "Olmo3ForCausalLM",
            DENSE | by_kind(YARN_OLMO, plain) | {"num_hidden_layers": 4, "sliding_window": 8},
            old=True,
            teeth=(
                WINDOW_9,
                {f"rope_parameters.{FULL}": plain},
                {f"rope_parameters.{SLIDING}": YARN_OLMO},
            ),
        ),
        "qwen2_windows": Spec(
            "Qwen2ForCausalLM",
            DENSE | rope(1000000.0) | first_full,
            old=True,
            teeth=(WINDOW_9, {"layer_types": [SLIDING] * 3}, {"layer_types": [FULL] * 3}),
        ),
        "qwen3_windows": Spec(
            "Qwen3ForCausalLM",
            DENSE | HEAD | rope(1000000.0) | first_full,
            teeth=(WINDOW_9, {"layer_types": [SLIDING] * 3}, {"layer_types": [FULL] * 3}),
        ),
        "mistral_window": Spec(
            "MistralForCausalLM",
            DENSE | HEAD | rope(10000.0) | {"sliding_window": 8},
            old=True,
            teeth=(WINDOW_9, {"sliding_window": None}),
        ),
        "mixtral_window": Spec(
            "MixtralForCausalLM",
            DENSE
            | HEAD
            | rope(1000000.0)
            | {"intermediate_size": 48, "num_local_experts": 6, "sliding_window": 8},
            teeth=(WINDOW_9, {"num_experts_per_tok": 1}),
        ),
        "smollm3_windows": Spec(
            "SmolLM3ForCausalLM",
            DENSE
            | rope(2000000.0)
            | {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 8}
            | {"no_rope_layers": [1, 0, 1, 0]},
            teeth=(WINDOW_9, {"no_rope_layers": [1, 1, 1, 1]}, {"layer_types": [SLIDING] * 4}),
        ),
        "starcoder2_window": Spec(
            "Starcoder2ForCausalLM",
            DENSE | rope(100000.0) | {"use_bias": True, "sliding_window": 8},
            teeth=(WINDOW_9, {"sliding_window": None}),
        ),
    }


def heads() -> dict[str, Spec]:
    """List classifiers and embedding models."""
    names = {0: "negative", 1: "neutral", 2: "positive"}
    gpt2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT, "vocab_size": VOCAB}
    return {
        "qwen3_reranker": Spec(
            "Qwen3ForSequenceClassification",
            DENSE | HEAD | rope(1000000.0) | {"num_labels": 1, "tie_word_embeddings": True},
            kind="classifier",
        ),
        "llama_classifier": Spec(
            "LlamaForSequenceClassification",
            DENSE
            | HEAD
            | rope(10000.0)
            | {"id2label": names, "label2id": {label: i for i, label in names.items()}},
            kind="classifier",
            old=True,
        ),
        "gpt2_classifier": Spec(
            "GPT2ForSequenceClassification",
            gpt2 | {"num_labels": 2, "bos_token_id": 1, "eos_token_id": 2},
            kind="classifier",
            old=True,
        ),
        "qwen3_embedding": Spec(
            "Qwen3Model",
            DENSE | HEAD | rope(1000000.0),
            kind="embedding",
            old=True,
            edits={"architectures": ["Qwen3ForCausalLM"]},
            pooling="lasttoken",
            normalize=True,
        ),
        "llama_embedding": Spec(
            "LlamaModel",
            DENSE | HEAD | rope(10000.0),
            kind="embedding",
            pooling="mean_tokens",
        ),
    }
