"""What the dashboard shows, from receipts alone."""

from __future__ import annotations

import re
from typing import Any

import pytest

from services.router.execution.request_timeline import ReceiptLog
from services.router.frontend.dashboard import MAX_POINTS, PAGES, WINDOW_S, Goal, is_loopback, snapshot
from tandem.v1 import common_pb2, generation_pb2

NOBODY = {"toy": Goal(None, None)}


def ended(
    at: float,
    ttft: float = 0.1,
    tpot: float = 0.01,
    tokens: int = 10,
    prefill: str = "prefill-0",
    model: str = "toy",
) -> Any:
    moved = common_pb2.TransferReport(transport="nixl:ucx:cma", bytes=1000, seconds=0.5) if prefill else None
    return generation_pb2.Receipt(
        model=model,
        ended_at=at,
        ttft_seconds=ttft,
        tpot_seconds=tpot if tokens > 1 else 0.0,
        completion_tokens=tokens,
        prefill_worker=prefill,
        decode_worker="decode-0",
        transfer=moved,
    )


def kept(*items: Any, since: float = 0.0, most: int = 1000) -> ReceiptLog:
    receipts = ReceiptLog(most)
    receipts.since = since
    for item in items:
        receipts.keep(item)
    return receipts


def test_goodput_counts_who_met_every_objective_that_there_is() -> None:
    """A slow first token or slow tokens miss; where there is no objective nobody misses."""
    items = kept(ended(99.0, ttft=0.4), ended(99.1, tpot=0.2), ended(99.2), ended(99.3, ttft=0.4, tpot=0.2))
    for goal, met in ((Goal(0.3, 0.1), 1), (Goal(0.3, None), 2), (Goal(None, 0.1), 2), (Goal(None, None), 4)):
        found = snapshot(items, 100.0, {"toy": goal})
        assert (found["ended"], found["met"]) == (4, met)
        assert sum(second[1] for second in found["seconds"]) == met
        assert sum(point[3] for point in found["points"]) == met


def test_each_answer_is_judged_by_the_objectives_of_its_model() -> None:
    """What is slow for one model is in time for another; the page gets the objectives of both."""
    items = kept(ended(99.0, ttft=0.4), ended(99.1, ttft=0.4, model="other"))
    found = snapshot(items, 100.0, {"toy": Goal(0.2, None), "other": Goal(5.0, 0.1)})
    assert [point[3] for point in found["points"]] == [True, False]  # the newest first
    assert found["goals"] == {"toy": {"ttft": 0.2, "tpot": None}, "other": {"ttft": 5.0, "tpot": 0.1}}


def test_what_ended_before_the_window_does_not_count() -> None:
    """Seconds are whole ones, the last is over; the window is no longer than what is known."""
    items = [ended(at) for at in (30.0, 41.5, 98.9, 99.0, 99.99, 100.1)]
    found = snapshot(kept(*items), 100.2, NOBODY)
    assert (found["window"], found["ended"], found["tokens"]) == (60.0, 5, 50)
    counts = [second[0] for second in found["seconds"]]
    assert (counts[-1], counts[-2], counts[41 - 100], sum(counts)) == (2, 1, 1, 4)  # 100.1 is of a second that runs
    assert snapshot(kept(*items, since=98.2), 100.2, NOBODY)["window"] == pytest.approx(2.0)
    full = kept(*items, most=4)  # what went before 98.9 is not all there any more
    assert snapshot(full, 100.2, NOBODY)["window"] == pytest.approx(100.2 - 41.5)
    nothing = snapshot(kept(), 100.0, NOBODY)
    assert (nothing["ended"], nothing["ttft"], nothing["links"], nothing["points"]) == (0, {}, [], [])


def test_what_ended_before_the_clock_was_set_back_does_not_count() -> None:
    """Requests do not end in the future; those since then are shown for a minute, as always."""
    found = snapshot(kept(ended(3700.0), ended(70.0), ended(99.0), since=3600.0), 100.0, NOBODY)
    assert (found["window"], found["ended"], len(found["points"])) == (60.0, 2, 2)
    assert all(place >= 0 for place, *_ in found["points"])
    assert sum(second[0] for second in found["seconds"]) == 2


def test_each_pair_has_its_transfers_and_local_answers_have_none() -> None:
    """Bytes by the seconds in which they moved are the rate of a pair."""
    items = kept(ended(99.0), ended(99.1), ended(99.2, prefill=""), ended(99.3, prefill="prefill-1"))
    links = {link["prefill"]: link for link in snapshot(items, 100.0, NOBODY)["links"]}
    assert (links["prefill-0"]["bytes"], links["prefill-0"]["seconds"], links["prefill-0"]["requests"]) == (
        2000,
        1.0,
        2,
    )
    assert (links[""]["bytes"], links[""]["requests"], links[""]["transport"]) == (0, 1, "")
    assert links["prefill-1"]["transport"] == "nixl:ucx:cma"


def test_percentiles_leave_out_answers_of_one_token_and_the_drawing_is_bounded() -> None:
    """An answer of one token has no time between tokens, which is not a time of nothing."""
    items = [ended(50.0, tokens=1), *(ended(60.0, tpot=0.02) for _ in range(2 * MAX_POINTS))]
    found = snapshot(kept(*items), 70.0, NOBODY)
    assert found["tpot"] == {"p50": 0.02, "p95": 0.02, "p99": 0.02}
    assert len(found["points"]) == MAX_POINTS
    assert len(found["seconds"]) == WINDOW_S
    assert snapshot(kept(items[0]), 70.0, NOBODY)["points"] == [[20.0, 0.1, None, True]]


@pytest.mark.parametrize(
    ("host", "is_it"),
    [
        *[
            ("127.0.0.1", True),
            ("127.8.0.1", True),
            ("::1", True),
            ("localhost", True),
            ("localhost.evil.example", False),
        ],
        *[("10.0.0.1", False), ("", False), ("127.0.0.1.evil.example", False), ("0.0.0.0", False), ("[::1", False)],
    ],
)
def test_loopback_is_what_this_machine_calls_itself(host: str, is_it: Any) -> None:
    """Names that only begin like it are somebody else's."""
    assert is_loopback(host) is is_it


def test_the_library_that_draws_comes_with_its_licence() -> None:
    """uPlot is served with the page, in the version that its file names, and so is the text that permits that."""
    library = PAGES["/dashboard/uplot/uPlot.iife.min.js"].read_text(encoding="utf-8")
    assert re.match(r"/\*! https://github.com/leeoniya/uPlot \(v\d+\.\d+\.\d+\) \*/", library)
    licence = PAGES["/dashboard/uplot/LICENSE"].read_text(encoding="utf-8")
    assert "The MIT License (MIT)" in licence
    assert "Leon Sorokin" in licence


def test_the_page_is_whole_and_asks_nobody_else() -> None:
    """Every file that a file names is served, no address of another host is in any, and nothing is made from markup."""
    texts = {path: file.read_text(encoding="utf-8") for path, file in PAGES.items()}
    names = {path.removeprefix("/dashboard/") for path in PAGES}
    for path, text in texts.items():
        for named in re.findall(r'(?:from |href=|src=)"(?:\./|dashboard/)([^"]+)"', text):
            assert named in names, path
        assert not [url for url in re.findall(r"https?://[^\s\"']+", text) if url != "http://www.w3.org/2000/svg"] or (
            "/uplot/" in path  # a comment says where it is from
        )
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
        assert not re.search(r"<style|<script>|\sstyle=|\son\w+=", text) or path.endswith(".js")
