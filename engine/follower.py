"""A rank of a worker other than rank 0: loads its part of the model and runs the steps that rank 0 sends.

It ends when rank 0's process ends, closes the connection, or breaks the group. It has no network and no sampling.
"""

from __future__ import annotations

import logging
import os
import socket
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch

from engine import kernels
from engine.kv.kv_cache import KvCache
from engine.loading.model_loader import load_model
from engine.parallel import rank_messages
from engine.parallel.rank_group import RankGroup, mapped
from engine.parallel.rank_memory import Loading
from engine.parallel.rank_messages import ADAPTER, CAPTURE, FAILED, FREE, LOAD, PAGES, READY, STEP
from engine.runner.captured_steps import Decode, Uncapturable
from engine.runner.lora import received
from engine.runner.model_runner import ModelRunner
from tandem.errors import InternalError, TandemError, Unavailable

CPU = torch.device("cpu")

log = logging.getLogger(__name__)


def prepare(options: dict[str, Any]) -> dict[str, Any]:
    """This process's threads and operators; returns what load_model is to be given. Raises SettingsError."""
    dtype = getattr(torch, options.pop("dtype"))
    torch.set_num_threads(options.pop("threads"))
    kernels.use(options.pop("sum_order"), CPU, dtype)
    return {**options, "dtype": dtype, "device": CPU, "progress": log.debug}


def follow(model: ModelRunner, connection: socket.socket) -> None:
    """Runs steps until the connection ends. Raises RuntimeError when the group breaks."""
    pages: dict[int, KvCache] = {}
    captured: dict[int, Decode] = {}  # by the number of their pages
    while True:
        kind, content, files = rank_messages.receive(connection)
        if kind == STEP:
            number, batch, replayed, marks = rank_messages.from_step(content)
            if model.lora and model.lora.marks(batch) != marks:
                raise InternalError("this rank's slots have other adapters than rank 0's")
            if not replayed:
                model.forward(pages[number], batch)
            elif captured[number].logits(batch) is None:
                raise InternalError("rank 0 replays a step that does not fit here")
        elif kind == PAGES:
            about = rank_messages.from_json(content)
            layout, count = model.layout(about["block_size"]), about["num_blocks"]
            memory = mapped(files[0], count * layout.block_bytes)
            os.close(files[0])
            pages[about["number"]] = KvCache(layout, count, CPU, facts=model.facts, memory=memory)
        elif kind == CAPTURE:
            about = rank_messages.from_json(content)
            number = about.pop("number")
            with suppress(Uncapturable):  # on all ranks
                captured[number] = Decode(model, pages[number], **about, capture=None)
        elif kind == ADAPTER:
            about = rank_messages.from_json(content)
            matrices = mapped(files[0], about["bytes"]).numpy().tobytes()
            os.close(files[0])
            try:
                model.put_adapter(about["slot"], received(about["adapter"], matrices))
            except Unavailable as error:  # on all ranks
                log.error("%s", error.message)
        elif kind == FREE:
            for number in rank_messages.from_json(content)["numbers"]:
                captured.pop(number, None)
                del pages[number]


def main(connection: socket.socket, memory: int, rank: int, size: int) -> int:
    """Returns the process's exit status. `memory` is the group's."""
    connection.settimeout(None)
    group: RankGroup | None = None
    try:
        kind, content, _ = rank_messages.receive(connection)
        assert kind == LOAD
        options = prepare(rank_messages.from_json(content))
        group = RankGroup(rank, size, memory)
        os.close(memory)
        with Loading() as loading:
            model = load_model(**options, group=group)
        rank_messages.send(connection, READY, rank_messages.of_json(asdict(loading.memory())))
        follow(model, connection)
    except EOFError:  # rank 0 has ended, or has ended this rank
        return 0
    except Exception as error:
        if group is not None:
            group.break_off()
        log.exception("rank %d of %d ends", rank, size)
        why = error.message if isinstance(error, TandemError) else f"{type(error).__name__}: {error}"
        with suppress(OSError):
            rank_messages.send(connection, FAILED, rank_messages.of_json({"why": why}))
        return 1
    return 0
