"""vLLM's CPU build, through its offline interface."""

import json
import os
import statistics
import sys
import time

from peak import peak_mb

START = time.time()
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def main(shape: dict) -> dict:
    """Measure every shape; decoding is the time of long replies less that of short ones."""
    cores = f"0-{shape['threads'] - 1}"
    os.environ.update(SETTINGS, VLLM_CPU_OMP_THREADS_BIND=cores)
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    engine = LLM(
        model=shape["model"],
        dtype=shape["weights"],
        max_model_len=1024,
        max_num_seqs=max(shape["batches"]),
        enable_prefix_caching=False,
        disable_log_stats=True,
    )

    def seconds(prompts: list[list[int]], count: int) -> float:
        params = SamplingParams(
            temperature=0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False
        )
        begin = time.perf_counter()
        engine.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return time.perf_counter() - begin

    tokens, context, steps = shape["tokens"], shape["context"], shape["steps"]
    seconds([tokens[:16]], 1)
    found = {"start_s": time.time() - START}
    prompt = [tokens[: shape["prefill"]]]
    seconds(prompt, 1)
    found["prefill"] = shape["prefill"] / statistics.median(seconds(prompt, 1) for _ in range(3))
    for batch in shape["batches"]:
        prompts = [tokens[row : row + context] for row in range(batch)]
        seconds(prompts, 2)
        short = statistics.median(seconds(prompts, 1) for _ in range(3))
        found[f"decode_{batch}"] = batch * (steps - 1) / (seconds(prompts, steps) - short)
        if batch == 1:
            found["memory_mb"] = peak_mb()
    return found


if __name__ == "__main__":
    result = main(json.loads(sys.argv[1]))
    print(json.dumps(result), flush=True)
    os._exit(0)  # its worker threads may keep the process
