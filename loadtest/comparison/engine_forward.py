"""One engine in one process, which times what lines on stdin ask for: `engine_forward.py ENGINE CHECKPOINT THREADS`.

The Python of the engine's own environment runs it, so it imports no module of Tandem at the top, and each engine only
in its function. An engine is two functions:

    prefill(prompt)          -> (seconds of one forward of the whole prompt, the most likely next token)
    decode(prompts, steps)   -> seconds of each of `steps` steps of all these sequences, after their prefill

Input is a line of JSON, {"prefill": ids} or {"decode": [ids, ...], "steps": n}; output is a line. "ready" comes first.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

Prefill = Callable[[list[int]], tuple[float, int]]
Decode = Callable[[list[list[int]], int], list[float]]
LONGEST, MOST = 1024, 8  # tokens of a sequence, sequences


def tandem(folder: Path, threads: int) -> tuple[Prefill, Decode]:
    """The engine's own step, with pool, scheduler and sampling."""
    import torch

    from engine.core.engine_config import EngineConfig
    from engine.core.sequence import Sequence
    from engine.engine import Engine
    from engine.loading.model_loader import load_model

    torch.set_num_threads(threads)
    model = load_model(str(folder), dtype=torch.bfloat16, device=torch.device("cpu"), max_model_len=LONGEST)
    blocks = (MOST + 1) * LONGEST // 16
    config = EngineConfig(num_blocks=blocks, block_size=16, token_budget=LONGEST, max_running=MOST, spare_block=True)
    engine = Engine(model, config)
    engine.capture()

    def add(name: str, prompt: list[int], max_len: int) -> Sequence:
        sequence = Sequence(id=name, tokens=list(prompt), prompt_len=len(prompt), max_len=max_len)
        engine.add(sequence)
        return sequence

    def prefill(prompt: list[int]) -> tuple[float, int]:
        sequence = add("prompt", prompt, len(prompt) + 1)
        return _taken(engine.step), sequence.tokens[-1]

    def decode(prompts: list[list[int]], steps: int) -> list[float]:
        sequences = [add(str(place), prompt, LONGEST) for place, prompt in enumerate(prompts)]
        while any(sequence.num_uncomputed > 1 for sequence in sequences):
            engine.step()
        seconds = [_taken(engine.step) for _ in range(steps)]
        for sequence in sequences:
            engine.drop(sequence.id)
        return seconds

    return prefill, decode


def transformers(folder: Path, threads: int) -> tuple[Prefill, Decode]:
    """Plain forwards with transformers' own cache and torch's attention; no `generate` around them."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    torch.set_num_threads(threads)
    auto: Any = AutoModelForCausalLM  # transformers' factories are not typed
    model = auto.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").eval()

    def forward(ids: Any, cache: Any) -> Any:
        with torch.inference_mode():
            return model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)

    def prefill(prompt: list[int]) -> tuple[float, int]:
        ids, start = torch.tensor([prompt]), perf_counter()
        token = forward(ids, DynamicCache())
        return perf_counter() - start, int(token)

    def decode(prompts: list[list[int]], steps: int) -> list[float]:
        cache, seconds = DynamicCache(), []
        ids = forward(torch.tensor(prompts), cache)
        for _ in range(steps):
            start = perf_counter()
            ids = forward(ids, cache)
            seconds.append(perf_counter() - start)
        return seconds

    return prefill, decode


def llama(folder: Path, threads: int) -> tuple[Prefill, Decode]:
    """llama.cpp by its C interface: llama_decode and an argmax. The GGUF is written next to the checkpoint once."""
    import ctypes

    import llama_cpp as cpp
    import numpy as np

    config = json.loads((folder / "config.json").read_text())
    vocab: int = config["vocab_size"]
    path = folder.with_suffix(".gguf")
    if not path.exists():
        _write_gguf(folder, path.with_suffix(".partial"), config)
        path.with_suffix(".partial").rename(path)
    silent = cpp.llama_log_callback(lambda level, text, data: None)  # `clear` below keeps it alive
    cpp.llama_log_set(silent, ctypes.c_void_p(0))
    cpp.llama_backend_init()
    model = cpp.llama_model_load_from_file(str(path).encode(), cpp.llama_model_default_params())
    wanted = cpp.llama_context_default_params()
    wanted.n_ctx, wanted.n_batch, wanted.n_ubatch, wanted.n_seq_max = (MOST + 1) * LONGEST, LONGEST, LONGEST, MOST
    wanted.n_threads = wanted.n_threads_batch = threads
    context = cpp.llama_init_from_model(model, wanted)
    batch = cpp.llama_batch_init(LONGEST * MOST, 0, 1)

    def put(tokens: Iterator[tuple[int, int, int, bool]]) -> None:
        batch.n_tokens = 0
        for token, position, sequence, logits in tokens:
            at = batch.n_tokens
            batch.token[at], batch.pos[at], batch.logits[at] = token, position, logits
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
            batch.n_tokens += 1

    def run() -> list[int]:
        assert cpp.llama_decode(context, batch) == 0
        rows = [place for place in range(batch.n_tokens) if batch.logits[place]]
        return [int(np.ctypeslib.as_array(cpp.llama_get_logits_ith(context, row), (vocab,)).argmax()) for row in rows]

    def begin(prompt: list[int], sequence: int) -> None:
        last = len(prompt) - 1
        put((token, place, sequence, place == last) for place, token in enumerate(prompt))

    def clear(alive: object = silent) -> None:
        cpp.llama_memory_clear(cpp.llama_get_memory(context), True)

    def prefill(prompt: list[int]) -> tuple[float, int]:
        clear()
        begin(prompt, 0)
        start = perf_counter()
        tokens = run()
        return perf_counter() - start, tokens[0]

    def decode(prompts: list[list[int]], steps: int) -> list[float]:
        clear()
        last, seconds = [], []
        for sequence, prompt in enumerate(prompts):
            begin(prompt, sequence)
            last += run()
        for step in range(steps):
            start = perf_counter()
            put((token, len(prompts[place]) + step, place, True) for place, token in enumerate(last))
            last = run()
            seconds.append(perf_counter() - start)
        return seconds

    return prefill, decode


def _write_gguf(folder: Path, path: Path, config: dict[str, Any]) -> None:
    """A checkpoint of the llama family with bfloat16 weights in llama.cpp's format, without a vocabulary."""
    import gguf
    import numpy as np

    weights = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(weights[:8], "little")
    header = json.loads(weights[8:start])
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}"
        begin, end = entry["data_offsets"]
        shape = entry["shape"]
        values = np.frombuffer(weights, np.uint16, (end - begin) // 2, start + begin).reshape(shape)
        of_heads = {"q_proj.weight": heads, "k_proj.weight": kv_heads}.get(".".join(name.split(".")[-2:]))
        if of_heads:  # llama.cpp rotates neighbours, transformers the halves of a head
            halves = values.reshape(of_heads, 2, shape[0] // of_heads // 2, shape[1])
            values = halves.swapaxes(1, 2).reshape(shape)
        to = names.get_name(name, try_suffixes=(".weight",))
        if len(shape) == 1:  # norms: float32 there
            writer.add_tensor(to, (values.astype(np.uint32) << 16).view(np.float32))
        else:
            writer.add_tensor(to, np.ascontiguousarray(values), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def openvino(folder: Path, threads: int) -> tuple[Prefill, Decode]:
    """OpenVINO GenAI's pipeline, by the durations of its own inferences. The export is written next to the
    checkpoint."""
    import numpy as np

    exported = folder.with_name(f"{folder.name}-openvino")
    if not exported.exists():
        from optimum.intel import OVModelForCausalLM

        partial = exported.with_name(f"{exported.name}.partial")
        OVModelForCausalLM.from_pretrained(folder, export=True, compile=False, load_in_8bit=False).save_pretrained(
            partial
        )
        partial.rename(exported)
    import openvino as ov
    import openvino_genai as genai

    options = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": threads, "ATTENTION_BACKEND": "SDPA"}
    pipeline = genai.LLMPipeline(str(exported), "CPU", **options)

    def generate(prompts: list[list[int]], count: int) -> tuple[list[float], list[int]]:
        ids = ov.Tensor(np.array(prompts, dtype=np.int64))
        mask = ov.Tensor(np.ones((len(prompts), len(prompts[0])), dtype=np.int64))
        wanted = genai.GenerationConfig(max_new_tokens=count, ignore_eos=True, do_sample=False)
        wanted.eos_token_id = 0  # ignored; without a tokenizer it would be -1, which is refused
        result = pipeline.generate(genai.TokenizedInputs(ids, mask), wanted)
        spent = result.perf_metrics.raw_metrics.token_infer_durations  # microseconds
        return [nanoseconds / 1e6 for nanoseconds in spent], [tokens[0] for tokens in result.tokens]

    def prefill(prompt: list[int]) -> tuple[float, int]:
        spent, tokens = generate([prompt], 1)
        return spent[0], tokens[0]

    def decode(prompts: list[list[int]], steps: int) -> list[float]:
        return generate(prompts, steps + 1)[0][1:]

    return prefill, decode


def vllm(folder: Path, threads: int) -> tuple[Prefill, Decode]:
    """vLLM's engine in this process, step by step."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    from vllm import LLM, SamplingParams

    served = LLM(
        model=str(folder),
        dtype="bfloat16",
        max_model_len=LONGEST,
        max_num_seqs=MOST,
        max_num_batched_tokens=LONGEST * MOST,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        async_scheduling=False,
    )
    engine = served.llm_engine

    def add(name: str, prompt: list[int], count: int) -> None:
        wanted = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        engine.add_request(name, {"prompt_token_ids": prompt}, wanted)

    def prefill(prompt: list[int]) -> tuple[float, int]:
        add("prompt", prompt, 1)
        start = perf_counter()
        answers = engine.step()
        return perf_counter() - start, answers[0].outputs[0].token_ids[0]

    def decode(prompts: list[list[int]], steps: int) -> list[float]:
        for place, prompt in enumerate(prompts):
            add(str(place), prompt, steps + 1)
        engine.step()  # all prompts, and the first tokens
        seconds = [_taken(engine.step) for _ in range(steps)]
        assert not engine.has_unfinished_requests()
        return seconds

    return prefill, decode


def floor(folder: Path, threads: int) -> tuple[Prefill, Decode]:
    """What this machine needs at least: multiply-adds at the rate of a large product, weights at that of reading."""
    import torch

    from loadtest.harness.machine import GEMM, STREAM_BYTES, products, reader

    torch.set_num_threads(threads)
    config = json.loads((folder / "config.json").read_text())
    weight_bytes = (folder / "model.safetensors").stat().st_size
    parameters = weight_bytes // 2 - config["vocab_size"] * config["hidden_size"]  # looked up, or for one position
    token_bytes = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    sides, read = products(torch.bfloat16).values(), reader()

    def prefill(prompt: list[int]) -> tuple[float, int]:
        rate = 2 * GEMM[0] * GEMM[1] * GEMM[2] / min(side() for side in sides for _ in range(5))
        return 2 * parameters * len(prompt) / rate, -1

    def decode(prompts: list[list[int]], steps: int) -> list[float]:
        rate = STREAM_BYTES / min(read() for _ in range(5))
        return [(weight_bytes + token_bytes * sum(map(len, prompts))) / rate]

    return prefill, decode


ENGINES = {engine_class.__name__: engine_class for engine_class in (tandem, transformers, llama, openvino, vllm, floor)}


def _taken(work: Callable[[], object]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


def main() -> None:
    """Answers until stdin ends. What the libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    prefill, decode = ENGINES[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        result = prefill(asked["prefill"]) if "prefill" in asked else decode(asked["decode"], asked["steps"])
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()
