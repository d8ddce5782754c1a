"""llama.cpp through llama-cpp-python's low-level interface.

It feeds tokens that were drawn beforehand and samples none, as llama.cpp's own benchmark does.
"""

import json
import statistics
import sys
import time

from peak import peak_mb

START = time.time()

import llama_cpp as lib  # noqa: E402  # pyright: ignore[reportMissingImports]

QUANTIZED = {"bf16": "LLAMA_FTYPE_MOSTLY_BF16", "q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0"}


class Runner:
    """A context of its own for one number of sequences."""

    def __init__(self, model, threads: int, sequences: int, length: int) -> None:
        """Allocate a cache of `length` tokens for each sequence."""
        params = lib.llama_context_default_params()
        params.n_ctx = sequences * (-(-length // 256) * 256)
        params.n_batch = params.n_ubatch = 512
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = False
        self.context = lib.llama_init_from_model(model, params)
        self.batch = lib.llama_batch_init(512, 0, 1)
        self.sequences = sequences

    def clear(self) -> None:
        """Forget all tokens."""
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)

    def read(self, sequence: int, tokens: list[int]) -> None:
        """Prefill one sequence; only its last token has logits."""
        for index, token in enumerate(tokens):
            self._set(index, token, index, sequence, index + 1 == len(tokens))
        self._run(len(tokens))

    def step(self, position: int, token: int) -> None:
        """Run one token of every sequence."""
        for sequence in range(self.sequences):
            self._set(sequence, token, position, sequence, True)
        self._run(self.sequences)

    def _set(self, index: int, token: int, position: int, sequence: int, logits: bool) -> None:
        self.batch.token[index] = token
        self.batch.pos[index] = position
        self.batch.n_seq_id[index] = 1
        self.batch.seq_id[index][0] = sequence
        self.batch.logits[index] = logits

    def _run(self, count: int) -> None:
        self.batch.n_tokens = count
        if lib.llama_decode(self.context, self.batch):
            raise RuntimeError("llama_decode failed")
        lib.llama_synchronize(self.context)

    def close(self) -> None:
        """Give the memory back."""
        lib.llama_batch_free(self.batch)
        lib.llama_free(self.context)


def convert(source: str, target: str, kind: str) -> None:
    """Write a GGUF file in another type, for models that come in one only."""
    params = lib.llama_model_quantize_default_params()
    params.ftype = getattr(lib, QUANTIZED[kind])
    params.allow_requantize = True
    if lib.llama_model_quantize(source.encode(), target.encode(), params):
        raise RuntimeError(f"{source} could not be written as {kind}")


def main(shape: dict) -> dict:
    """Measure every shape."""
    lib.llama_backend_init()
    silent = lib.llama_log_callback(lambda *_: None)  # lives as long as the library calls it
    lib.llama_log_set(silent, None)
    if shape["weights"] in QUANTIZED:
        convert(shape["model"], shape["scratch"], shape["weights"])
        shape = {**shape, "model": shape["scratch"]}
    start = time.time()
    model = lib.llama_model_load_from_file(
        shape["model"].encode(), lib.llama_model_default_params()
    )
    runner = Runner(model, shape["threads"], 1, shape["prefill"])
    runner.read(0, shape["tokens"][:16])
    found = {"start_s": time.time() - start + shape.get("import_s", 0.0)}
    runner.clear()

    def prefill() -> float:
        runner.clear()
        begin = time.perf_counter()
        runner.read(0, shape["tokens"][: shape["prefill"]])
        return shape["prefill"] / (time.perf_counter() - begin)

    found["prefill"] = statistics.median(prefill() for _ in range(3))
    runner.close()
    for batch in shape["batches"]:
        found[f"decode_{batch}"] = decode(model, shape, batch)
        if batch == 1:
            found["memory_mb"] = peak_mb()
    return found


def decode(model, shape: dict, batch: int) -> float:
    """Return tokens/s over all sequences, each behind a prompt of its own."""
    steps, context = shape["steps"], shape["context"]
    runner = Runner(model, shape["threads"], batch, context + steps + 1)
    for sequence in range(batch):
        runner.read(sequence, shape["tokens"][sequence : sequence + context])
    runner.step(context, shape["tokens"][0])
    begin = time.perf_counter()
    for index in range(1, steps):
        runner.step(context + index, shape["tokens"][index])
    rate = batch * (steps - 1) / (time.perf_counter() - begin)
    runner.close()
    return rate


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    print(json.dumps(main({**arguments, "import_s": time.time() - START})))
