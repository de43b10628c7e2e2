"""lm-eval's command: log-likelihoods of answers compared with those of transformers, and generated answers.

The task is made here, since those of lm-eval come from the network. Requests carry token ids, lm-eval's default, and
then text.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from report import check, need, target

SERVER = target()
BOUND = 1e-4
TIMEOUT_S = 300.0
QUESTIONS = [
    {"question": 'def add(a, b):\n    """Return the', "choices": ["sum of both.", "number", "name of a file"]},
    {"question": "The Eiger is a mountain. Its height is", "choices": ["3967 metres", "a string", "None"]},
    {"question": "x" * 300, "choices": ["y", "Größe 日本"]},
]
CHOICE = """task: choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
doc_to_text: "{{question}}"
doc_to_target: 0
output_type: multiple_choice
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
WRITE = """task: write
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
output_type: generate_until
generation_kwargs: {until: ["\\n"], max_gen_toks: 8}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@cache
def evaluated(tokens: bool) -> dict[str, list[dict[str, Any]]]:
    """The samples of both tasks as lm-eval logs them. Raises ValueError if it fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "data.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
        for task, text in (("choice", CHOICE), ("write", WRITE)):
            (folder / f"{task}.yaml").write_text(text.replace("DATA", str(folder / "data.jsonl")))
        arguments = f"model={SERVER.model},base_url={SERVER.url}/v1/completions,tokenizer={SERVER.folder},max_retries=1"
        command = [
            *(sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"),
            *("--model_args", arguments if tokens else f"{arguments},tokenized_requests=False"),
            *("--include_path", name, "--tasks", "choice,write", "--output_path", name, "--log_samples"),
        ]
        env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": name}
        done = subprocess.run(
            command, cwd=folder, env=env, timeout=TIMEOUT_S, capture_output=True, text=True, check=False
        )
        need(done.returncode == 0, done.stderr[-400:])
        found = {task: list(folder.glob(f"*/samples_{task}_*.jsonl")) for task in ("choice", "write")}
        return {task: [json.loads(line) for line in files[0].read_text().splitlines()] for task, files in found.items()}


def likelihoods(tokens: bool) -> str:
    theirs = []
    for sample in evaluated(tokens)["choice"]:
        for asked, (said, _greedy) in zip(sample["arguments"].values(), sample["filtered_resps"], strict=True):
            theirs.append((asked["arg_0"], asked["arg_1"], float(said)))
    pairs = [(context, continuation) for context, continuation, _ in theirs]
    script = str(Path(__file__).parent / "reference_likelihoods.py")
    done = subprocess.run(
        [SERVER.python, script, SERVER.folder],
        input=json.dumps(pairs),
        timeout=TIMEOUT_S,
        capture_output=True,
        text=True,
        check=False,
    )
    need(done.returncode == 0, done.stderr[-400:])
    worst = max(abs(said - right) for (*_, said), right in zip(theirs, json.loads(done.stdout), strict=True))
    need(len(theirs) == sum(len(question["choices"]) for question in QUESTIONS) and worst <= BOUND, worst)
    return f"{len(theirs)} log-likelihoods, at most {worst:.1e} from transformers'"


def generate() -> str:
    answers = [sample["resps"][0][0] for sample in evaluated(True)["write"]]
    need(any(answers) and not any("\n" in answer for answer in answers), answers)
    return str(answers)


check("loglikelihood", lambda: likelihoods(True))
check("loglikelihood of text", lambda: likelihoods(False))
check("generate_until", generate)
