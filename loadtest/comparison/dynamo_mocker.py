"""Seconds to the first token of Dynamo's mocker, called over Dynamo's own runtime without its frontend.

Runs in Dynamo's environment, with the DYN_* of the mocker: `python dynamo_mocker.py REQUESTS PROMPT VOCAB` prints a
JSON list.
"""

import asyncio
import json
import random
import sys
from time import perf_counter

from dynamo.runtime import DistributedRuntime


async def main(requests: int, prompt: int, vocab: int) -> None:
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    client = await runtime.endpoint("dynamo.backend.generate").client()
    await client.wait_for_instances()
    seconds = []
    for _ in range(requests):
        body: dict[str, object] = {"model": "demo", "token_ids": random.choices(range(2, vocab), k=prompt)}
        body |= {"stop_conditions": {"max_tokens": 1, "ignore_eos": True}, "sampling_options": {}, "output_options": {}}
        body |= {"eos_token_ids": [], "annotations": []}
        sent = perf_counter()
        stream = await client.random(body)
        async for _ in stream:
            seconds.append(perf_counter() - sent)
            break
        async for _ in stream:
            pass
    print(json.dumps(seconds), flush=True)
    runtime.shutdown()


asyncio.run(main(*map(int, sys.argv[1:])))
