"""Two checkpoints behind one cluster's name whose vocabularies differ, as while an upgrade replaces one: text is served
by the workers that know its router's tokens."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from services import launch
from services.worker import Worker
from tandem.async_client import AsyncClient
from tandem.errors import NoWorker
from tests.support.waiting import until

DEMO = Path(__file__).parents[2] / "demo" / "model"
PROMPT = "def test_push_and_pop():\n    stack = "
FIRST, LAST = 300, 2047  # ids of merged tokens


@pytest.fixture(scope="module")
def renumbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model, with other ids for the same tokens: the same text, of other ids."""
    folder = tmp_path_factory.mktemp("renumbered") / "model"
    shutil.copytree(DEMO, folder)
    about = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = about["model"]["vocab"]
    about["model"]["vocab"] = {
        name: FIRST + LAST - token if token >= FIRST else token for name, token in vocabulary.items()
    }
    (folder / "tokenizer.json").write_text(json.dumps(about))
    tensors = load_file(folder / "model.safetensors")
    rows = tensors["model.embed_tokens.weight"]  # which are the head, too
    rows[FIRST : LAST + 1] = rows[FIRST : LAST + 1].flip(0)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("says", [True, False], ids=["as it is", "control"])
async def test_text_is_served_by_workers_of_its_routers_vocabulary(
    inside: Any, renumbered: Path, monkeypatch: pytest.MonkeyPatch, says: bool
) -> None:
    """Former and new router both give the model's text, each from its own worker. Without a worker of its vocabulary a
    router says so, in the error, the list of workers and the findings. In the control the workers are of an older
    version, which does not say, so that both get requests from either router, and some texts are others."""
    if not says:
        told = Worker.record
        monkeypatch.setattr(Worker, "record", lambda worker: dataclasses.replace(told(worker), vocabulary=""))
    wanted = {"max_tokens": 12, "temperature": 0.0}
    async with inside(model=str(DEMO), prefill=0, queue_timeout_s=1.0, place_by_prefix=False) as cluster:
        text = (await cluster.client.generate(PROMPT, **wanted)).text
        assert text.strip()
        cluster.settings = cluster.settings.model_copy(update={"model": str(renumbered)})
        await cluster.start_worker("decode-1")
        new = await launch.start("router", cluster.settings, "router-1")
        client = AsyncClient(new.address)
        try:
            for router in (cluster.router, new):
                view = next(iter(router.models)).pools.view
                await until(lambda view=view: {"decode-0", "decode-1"} <= view.workers.keys())
            for own, one in (("decode-0", cluster.client), ("decode-1", client)):
                answers = [await one.generate(PROMPT, **wanted) for _ in range(4)]
                while not says and {answer.receipt.decode_worker for answer in answers} == {own}:
                    answers.append(await one.generate(PROMPT, **wanted))
                assert says is all(answer.receipt.decode_worker == own for answer in answers)
                assert says is all(answer.text == text for answer in answers)
                states = {worker.worker_id: worker.state for worker in await one.workers() if worker.role == "decode"}
                assert states == {"decode-0": "ready", "decode-1": "ready"} | (
                    {"decode-1" if own == "decode-0" else "decode-0": "other-vocabulary"} if says else {}
                )
            await cluster.workers["decode-1"].stop(0.0)
            view = next(iter(new.models)).pools.view
            await until(lambda: "decode-1" not in view.workers)
            if says:
                with pytest.raises(NoWorker, match="no decode worker with the vocabulary of this router's tokenizer"):
                    await client.generate(PROMPT, **wanted)
                assert any(
                    problem.startswith("decode-0: ") and "vocabulary" in problem
                    for problem in (await client.diagnose()).problems
                )
            else:
                assert (await client.generate(PROMPT, **wanted)).receipt.decode_worker == "decode-0"
            assert (await cluster.client.generate(PROMPT, **wanted)).text == text
        finally:
            await client.close()
            await new.stop(0.0)


async def test_a_router_without_a_tokenizer_asks_every_worker(inside: Any, renumbered: Path, tmp_path: Path) -> None:
    """It serves token ids only, whatever they mean; and it does not care whether the workers have a tokenizer."""
    bare = tmp_path / "bare"
    shutil.copytree(DEMO, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    async with inside(model=str(bare), prefill=0) as cluster:
        cluster.settings = cluster.settings.model_copy(update={"model": str(renumbered)})
        await cluster.start_worker("decode-1")
        await cluster.seen(2)
        answers = [await cluster.client.generate([5, 6, 7], max_tokens=2, ignore_eos=True) for _ in range(4)]
        assert {answer.receipt.decode_worker for answer in answers} == {"decode-0", "decode-1"}
