"""Adapters that are loaded and unloaded while the cluster runs: on all workers or on none, and no request for anything
else notices."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from loadtest.harness.random_checkpoints import make_adapter
from tests.support import oracle

NEW = 12


@pytest.fixture(scope="module")
def root(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder from which adapters may be loaded, with two of `tiny`."""
    folder = tmp_path_factory.mktemp("adapters")
    make_adapter(folder / "red", tiny, seed=1, rank=4)
    make_adapter(folder / "blue", tiny, seed=3, rank=8, use_rslora=True, lora_alpha=3)
    return folder


@pytest.fixture(scope="module")
def references(tiny: Path, root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By name, a checkpoint with the adapter in its weights; "" is the base."""
    folder = tmp_path_factory.mktemp("merged")
    return {"": tiny, **{name: oracle.merged(tiny, root / name, folder / name) for name in ("red", "blue")}}


async def call(cluster: Any, path: str, body: dict[str, Any] | None = None, key: str = "") -> tuple[int, Any]:
    """Status and body of the answer over HTTP: parsed JSON, or text."""
    request = urllib.request.Request(f"http://{cluster.router.http.address}{path}")
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("content-type", "application/json")
    if key:
        request.add_header("authorization", f"Bearer {key}")

    def ask() -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    status, raw = await asyncio.to_thread(ask)
    text = raw.decode()
    return status, json.loads(text) if text.startswith("{") else text


async def load(cluster: Any, name: str, path: str | Path) -> tuple[int, Any]:
    return await call(cluster, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})


async def unload(cluster: Any, name: str) -> tuple[int, Any]:
    return await call(cluster, "/v1/unload_lora_adapter", {"lora_name": name})


async def complete(cluster: Any, model: str, prompt: list[int]) -> tuple[int, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    return await call(cluster, "/v1/completions", {**body, "return_token_ids": True})


# ---- what a client sees


async def test_a_loaded_adapter_is_served_as_one_of_the_settings(
    inside: Any, root: Path, references: dict[str, Path], tiny: Path
) -> None:
    """Over HTTP and gRPC, over both pools, with the tokens of merged weights; the list of models has it. Unloaded, it is
    404, and the base model goes on."""
    prompt = oracle.prompts(tiny, [40])[0]
    wanted = oracle.greedy(references["red"], prompt, NEW)
    assert wanted != oracle.greedy(tiny, prompt, NEW)
    async with inside(adapter_root=root, adapter_slots=2, http_port=0) as cluster:
        assert (await complete(cluster, "red", prompt))[0] == 404
        assert await load(cluster, "red", "red") == (200, "Success: LoRA adapter 'red' added successfully.")
        status, answer = await complete(cluster, "red", prompt)
        assert (status, answer["choices"][0]["token_ids"]) == (200, wanted)
        done = await cluster.client.generate(prompt, adapter="red", max_tokens=NEW, ignore_eos=True)
        assert done.token_ids == wanted
        assert done.receipt.path == "disaggregated"
        assert done.receipt.cached_tokens >= 32, "the second request found the blocks of the first"
        _, models = await call(cluster, "/v1/models")
        assert [model["id"] for model in models["data"]][1:] == ["red"]
        assert await unload(cluster, "red") == (200, "Success: LoRA adapter 'red' removed successfully.")
        assert (await complete(cluster, "red", prompt))[0] == 404
        base = await cluster.client.generate(prompt, max_tokens=NEW, ignore_eos=True)
        assert base.token_ids == oracle.greedy(tiny, prompt, NEW)
