"""Hugging Face's transformers with PyTorch, its cache growing as `generate` lets it grow."""

import json
import os
import statistics
import sys
import time

from peak import peak_mb

START = time.time()
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import torch  # noqa: E402  # pyright: ignore[reportMissingImports]
from transformers import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    AutoModelForCausalLM,
    DynamicCache,
)


def main(shape: dict) -> dict:
    """Measure every shape."""
    torch.set_num_threads(shape["threads"])
    torch.set_grad_enabled(False)
    dtype = getattr(torch, shape["weights"])
    model = AutoModelForCausalLM.from_pretrained(shape["model"], dtype=dtype).eval()
    run(model, torch.tensor([shape["tokens"][:16]]), None)
    found = {"start_s": time.time() - START}
    prompt = torch.tensor([shape["tokens"][: shape["prefill"]]])

    def prefill() -> float:
        begin = time.perf_counter()
        run(model, prompt, None)
        return shape["prefill"] / (time.perf_counter() - begin)

    prefill()
    found["prefill"] = statistics.median(prefill() for _ in range(3))
    for batch in shape["batches"]:
        found[f"decode_{batch}"] = decode(model, shape, batch)
        if batch == 1:
            found["memory_mb"] = peak_mb()
    return found


def run(model, tokens, cache):
    """Return the greedy next tokens `[B, 1]` and the cache."""
    cache = cache or DynamicCache(config=model.config)
    out = model(tokens, use_cache=True, past_key_values=cache, logits_to_keep=1)
    return out.logits[:, -1].argmax(-1, keepdim=True), cache


def decode(model, shape: dict, batch: int) -> float:
    """Return tokens/s over all sequences, each behind a prompt of its own."""
    context = shape["context"]
    prompts = [shape["tokens"][row : row + context] for row in range(batch)]
    tokens, cache = run(model, torch.tensor(prompts), None)
    tokens, cache = run(model, tokens, cache)
    begin = time.perf_counter()
    for _ in range(1, shape["steps"]):
        tokens, cache = run(model, tokens, cache)
    return batch * (shape["steps"] - 1) / (time.perf_counter() - begin)


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
