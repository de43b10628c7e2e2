"""The log-likelihood of each continuation after its context, by transformers in float32: FOLDER as argument, pairs as
JSON on stdin, numbers as JSON on stdout. Runs in an environment with torch, which lm-eval's own need not have."""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    folder = sys.argv[1]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for context, continuation in json.load(sys.stdin):
        tokens = tokenizer(context + continuation).input_ids
        begin = len(tokenizer(context).input_ids)
        with torch.inference_mode():
            scores = model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
        found.append(sum(float(scores[place - 1, tokens[place]]) for place in range(begin, len(tokens))))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
