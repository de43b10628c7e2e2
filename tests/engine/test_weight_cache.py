"""Packed weights in files: used only when they are right, made once, shared, and never more than allowed."""

from __future__ import annotations

import errno
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file

from engine import builder, kernels
from engine.kernels import modules, weight_cache
from engine.kernels.weight_cache import BODY, KEPT, PARTIAL, WeightCache, cache_of, file_backed
from engine.loading import module_loader, self_check
from engine.loading.model_loader import load_model
from engine.loading.self_check import pack
from engine.runner.model_runner import ModelRunner
from tandem.errors import CheckpointRefused
from tandem.settings import Settings

CPU = torch.device("cpu")
built = pytest.mark.skipif(
    kernels.serving(CPU) == kernels.REFERENCE, reason="not built: python -m engine.kernels.build"
)
PARTS = [torch.arange(1000, dtype=torch.int32), torch.full((3,), 0.5)]
SIZES = [part.nbytes for part in PARTS]


@pytest.fixture
def cache(tmp_path: Path) -> WeightCache:
    return WeightCache(tmp_path / "weights", limit=64 << 20)


class Maker:
    """Makes `PARTS`, and counts how often."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> Iterable[torch.Tensor]:
        self.times += 1
        return PARTS


def same(found: list[torch.Tensor] | None) -> bool:
    return found is not None and all(
        torch.equal(one.view(part.dtype), part) for one, part in zip(found, PARTS, strict=True)
    )


def only_file(cache: WeightCache) -> Path:
    (path,) = files(cache)
    return path


def files(cache: WeightCache) -> list[Path]:
    return sorted(cache.folder.glob(f"*{KEPT}"))


def test_what_was_kept_is_found_and_mapped(cache: WeightCache) -> None:
    """The second caller gets the same bytes from the same file, and makes nothing."""
    make = Maker()
    first, second = cache.get("key", SIZES, make), cache.get("key", SIZES, make)
    assert same(first)
    assert same(second)
    assert make.times == 1
    assert second is not None
    assert all(file_backed(second))
    assert file_backed(PARTS) == [False, False]


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(BODY + 2001)
        byte = file.read(1)[0]
        file.seek(BODY + 2001)
        file.write(bytes([byte ^ 1]))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - weight_cache.ALIGNMENT)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def rename(path: Path) -> None:
    """Replaces other weights of the same size."""
    other = WeightCache(path.parent.parent / "other", 1 << 30)
    other.get("other", SIZES, lambda: [part + 1 for part in PARTS])
    os.replace(only_file(other), path)


def open_to_all(path: Path) -> None:
    path.chmod(0o666)


@pytest.mark.parametrize("damage", [flip, cut, empty, rename, open_to_all], ids=lambda one: one.__name__)
def test_a_damaged_file_is_never_used(cache: WeightCache, damage: Callable[[Path], None]) -> None:
    """It is found, made again, and right afterwards."""
    make = Maker()
    cache.get("key", SIZES, make)
    damage(only_file(cache))
    assert same(cache.get("key", SIZES, make))
    assert make.times == 2
    assert same(cache.get("key", SIZES, make))
    assert make.times == 2


@pytest.mark.parametrize("damage", [flip, rename], ids=lambda one: one.__name__)
def test_without_the_header_a_damaged_file_would_be_used(
    cache: WeightCache, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]
) -> None:
    """The control: with a header without information, the wrong bytes are used."""
    monkeypatch.setattr(weight_cache, "_header", lambda key, nbytes, digest: b"unchecked\n")
    cache.get("key", SIZES, Maker())
    damage(only_file(cache))
    found = cache.get("key", SIZES, Maker())
    assert found is not None
    assert not same(found)


@pytest.mark.parametrize("checked", [True, False])
def test_the_length_alone_keeps_a_cut_file_out(
    cache: WeightCache, monkeypatch: pytest.MonkeyPatch, checked: bool
) -> None:
    """Without the header it still does; without both, tensors come back that are too short."""
    monkeypatch.setattr(weight_cache, "_header", lambda key, nbytes, digest: b"unchecked\n")
    if not checked:
        monkeypatch.setattr(weight_cache, "_is_complete", lambda stat, nbytes: True)
    cache.get("key", SIZES, Maker())
    cut(only_file(cache))
    found = cache.get("key", SIZES, Maker())
    assert found is not None
    assert ([part.nbytes for part in found] == SIZES) is checked


@pytest.mark.parametrize("checked", [True, False])
def test_a_file_that_is_somebody_elses_is_not_used(
    cache: WeightCache, monkeypatch: pytest.MonkeyPatch, checked: bool
) -> None:
    """Another user could write to it after its digest was checked. The control, without the check: it is used."""
    make = Maker()
    cache.get("key", SIZES, make)
    open_to_all(only_file(cache))
    if not checked:
        monkeypatch.setattr(weight_cache, "_others_may_write", lambda stat: False)
    cache.get("key", SIZES, make)
    assert make.times == (2 if checked else 1)
    owner = os.geteuid()
    monkeypatch.setattr(weight_cache.os, "geteuid", lambda: owner + 1)
    assert (cache.get("key", SIZES, make) is None) is checked  # the user does not own the new file either


def test_nobody_else_can_read_or_write_it(cache: WeightCache) -> None:
    """From its first byte, although the umask here would allow it."""
    modes = []

    def watched() -> Iterable[torch.Tensor]:
        modes.extend(path.stat().st_mode & 0o777 for path in cache.folder.glob(f"*{PARTIAL}"))
        yield from PARTS

    before = os.umask(0)
    try:
        cache.get("key", SIZES, watched)
    finally:
        os.umask(before)
    modes += [only_file(cache).stat().st_mode & 0o777, cache.folder.stat().st_mode & 0o777]
    assert modes == [0o600, 0o600, 0o700]


@pytest.mark.parametrize("locked", [True, False])
def test_of_two_that_start_at_once_one_writes(
    cache: WeightCache, monkeypatch: pytest.MonkeyPatch, locked: bool
) -> None:
    """The other waits and maps the same file. The control, without the lock: both write."""
    both, arrived = threading.Event(), []
    together = threading.Barrier(2)  # in the control, both have seen that there is nothing before one writes

    def lock(path: Path, timeout: float) -> Any:
        arrived.append(path)
        if len(arrived) == 2:
            both.set()
        return FileLock(path, timeout=timeout) if locked else nullcontext()

    class Slow(Maker):
        def __call__(self) -> Iterable[torch.Tensor]:
            if locked:
                assert both.wait(600)
            else:
                together.wait(600)
            return super().__call__()

    monkeypatch.setattr(weight_cache, "FileLock", lock)
    if not locked:  # two writers of one process would have the same name
        monkeypatch.setattr(weight_cache.os, "getpid", threading.get_ident)
    make, found = Slow(), []
    threads = [threading.Thread(target=lambda: found.append(cache.get("key", SIZES, make))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert make.times == (1 if locked else 2)
    if locked:
        assert [same(one) for one in found] == [True, True]


def test_the_folder_stays_below_its_limit(cache: WeightCache) -> None:
    """The least recently used file goes; mapped files stay readable; a file that can never fit is not kept."""
    size = BODY + weight_cache.placed(SIZES)[1]
    small = WeightCache(cache.folder, limit=2 * size)
    first = small.get("a", SIZES, Maker())
    small.get("b", SIZES, Maker())
    for seconds, key in enumerate("ab"):
        os.utime(cache.folder / f"{key}{KEPT}", (seconds, seconds))
    small.get("a", SIZES, Maker())  # now the younger one
    small.get("c", SIZES, Maker())
    assert [path.stem for path in files(cache)] == ["a", "c"]
    small.get("d", SIZES, Maker())
    small.get("e", SIZES, Maker())
    assert same(first)
    assert WeightCache(cache.folder, limit=size - 1).get("f", SIZES, Maker()) is None
    for key in "fgh":  # the control: with room for all, none goes
        WeightCache(cache.folder, limit=10 * size).get(key, SIZES, Maker())
    assert len(files(cache)) == 5


def test_files_of_others_in_the_folder_stay(cache: WeightCache) -> None:
    """The configured folder may hold a user's own weights, or half of a download."""
    cache.folder.mkdir()
    own = [cache.folder / name for name in ("yolo.weights", "model.partial", "model.safetensors")]
    for path in own:
        path.write_bytes(b"x" * 100)
    size = BODY + weight_cache.placed(SIZES)[1]
    for key in "abc":
        WeightCache(cache.folder, limit=size).get(key, SIZES, Maker())
    assert [path.stem for path in files(cache)] == ["c"]
    assert all(path.exists() for path in own)


def test_what_cannot_be_kept_is_no_error(cache: WeightCache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A full disk, or a path that is not a folder: the caller gets None, and nothing is left behind."""
    monkeypatch.setattr(weight_cache.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 0}))
    assert cache.get("key", SIZES, Maker()) is None
    assert [path.name for path in cache.folder.iterdir()] == ["tandem.lock"]
    (tmp_path / "file").write_text("")
    assert WeightCache(tmp_path / "file", 1 << 30).get("key", SIZES, Maker()) is None


def test_a_disk_that_is_full_half_way_leaves_nothing(cache: WeightCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes may take the free space during the write."""
    write, written = os.write, []

    def full(descriptor: int, data: memoryview) -> int:
        if written:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(write(descriptor, data[:100]))
        return written[0]

    with monkeypatch.context() as patch:
        patch.setattr(weight_cache.os, "write", full)
        assert cache.get("key", SIZES, Maker()) is None
    assert written == [100]
    assert [path.name for path in cache.folder.iterdir()] == ["tandem.lock"]
    assert same(cache.get("key", SIZES, Maker()))


def test_a_folder_that_cannot_be_written_is_read(cache: WeightCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Existing files are used; missing ones are not kept, without an error."""

    def refused(*_: Any, **__: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    cache.get("key", SIZES, Maker())
    monkeypatch.setattr(weight_cache.os, "utime", refused)
    monkeypatch.setattr(weight_cache, "FileLock", refused)
    make = Maker()
    assert same(cache.get("key", SIZES, make))
    assert cache.get("other", SIZES, make) is None
    assert make.times == 0


def test_a_lock_that_nobody_gives_back_holds_up_for_a_while(
    cache: WeightCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the worker keeps its weights in its own memory."""
    monkeypatch.setattr(weight_cache, "LOCK_TIMEOUT_S", 0.2)
    cache.folder.mkdir()
    with FileLock(cache.folder / "tandem.lock"):
        assert cache.get("key", SIZES, Maker()) is None
    assert same(cache.get("key", SIZES, Maker()))


def test_a_writer_that_is_killed_harms_nobody(cache: WeightCache) -> None:
    """Its partial file is not used, its lock is released, and the next worker writes."""
    code = f"""
import os, signal, torch
from pathlib import Path
from engine.kernels.weight_cache import WeightCache
def parts():
    yield torch.zeros({40 << 20}, dtype=torch.uint8)
    os.kill(os.getpid(), signal.SIGKILL)
WeightCache(Path({str(cache.folder)!r}), 1 << 30).get("key", [{40 << 20}, 1], parts)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], timeout=600)
    assert done.returncode == -9
    (half,) = cache.folder.glob(f"*{PARTIAL}")
    assert half.stat().st_size > BODY
    assert files(cache) == []
    assert same(cache.get("key", SIZES, Maker()))
    assert not half.exists()


def test_parts_lie_one_behind_another() -> None:
    """At page boundaries; no parts if every product is quantised."""
    assert weight_cache.placed([1, 4096, 4097]) == ([0, 4096, 8192], 16384)
    assert weight_cache.placed([]) == ([], 0)


# ---- in a model


def logits(model: ModelRunner) -> torch.Tensor:
    return model.forward(model.allocate(4, 4), pack([([1, 2, 3, 4, 5], 0, [2, 0]), ([9], 0, [1])]))


@built
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", ["tiny-qwen3", "tiny-gpt2"])
def test_a_model_from_the_cache_is_the_same_model(
    cache: WeightCache, checkpoint: Callable[[str], Path], shape: str, dtype: torch.dtype
) -> None:
    """Same logits, bit for bit; afterwards no weight is in memory of this process, and a second load writes nothing."""
    folder = str(checkpoint(shape))
    alone = load_model(folder, dtype=dtype, device=CPU, max_model_len=64)
    for _ in range(2):
        shared = load_model(folder, dtype=dtype, device=CPU, max_model_len=64, cache=cache)
        assert torch.equal(logits(shared), logits(alone))
        assert all(file_backed(list(shared.module.parameters())))
        written = only_file(cache).stat().st_ino
    assert only_file(cache).stat().st_ino == written
    own = sum(each.nbytes for each in alone.module.parameters())
    assert shared.mapped_bytes >= 0.8 * own
    assert alone.mapped_bytes < shared.mapped_bytes
    assert self_check.check(shared).passed


@built
@pytest.mark.parametrize("named", [True, False])
def test_another_weight_is_another_file(
    cache: WeightCache,
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    named: bool,
) -> None:
    """The name is made of the weights themselves: an edited checkpoint cannot get what was packed before.

    The control, with a name of types and shapes alone: it gets just that, and only the self-check notices.
    """
    if not named:
        monkeypatch.setattr(modules, "digest_of", lambda tensor: f"{tensor.dtype}{tuple(tensor.shape)}")
    folder = tmp_path / "edited"
    folder.mkdir()
    for file in checkpoint("tiny-llama").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    load_model(str(folder), dtype=torch.float32, device=CPU, max_model_len=64, cache=cache)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("o_proj.weight"))
    tensors[name] = tensors[name].clone()
    tensors[name][3, 5] += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if not named:
        with pytest.raises(CheckpointRefused, match="self-check"):
            load_model(str(folder), dtype=torch.float32, device=CPU, max_model_len=64, cache=cache)
        return
    edited = load_model(str(folder), dtype=torch.float32, device=CPU, max_model_len=64, cache=cache)
    alone = load_model(str(folder), dtype=torch.float32, device=CPU, max_model_len=64)
    assert len(files(cache)) == 2
    assert torch.equal(logits(edited), logits(alone))


def test_the_name_is_of_all_that_packing_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits, type, shape, order, which are in panels, and the operators that made them and will read them."""
    one, two = torch.arange(12.0).view(3, 4), torch.ones(4)
    names = {
        modules._name([one], [two]),
        modules._name([one + torch.eye(3, 4) * 1e-6], [two]),
        modules._name([one.view(torch.int32)], [two]),
        modules._name([one.view(4, 3)], [two]),
        modules._name([one, two], []),
        modules._name([two], [one]),
    }
    monkeypatch.setattr(modules, "panels_of", lambda: "tandem-of-other-sources.so")
    names.add(modules._name([one], [two]))
    assert len(names) == 7


@built
def test_panels_have_the_size_that_was_foretold() -> None:
    """For every remainder of rows and columns."""
    for dtype in (torch.float32, torch.bfloat16):
        for n in (1, 15, 16, 64, 65, 130):
            for k in (1, 2, 31, 64, 577):
                weight = torch.zeros(n, k, dtype=dtype)
                assert modules._packed_bytes(weight) == torch.ops.tandem.pack(weight).nbytes


# ---- the memory left


def freed(told: Connection) -> None:
    """Tells by how many MiB the process shrinks."""
    process = psutil.Process()
    torch.ones(7 << 20)  # freed: pieces of less than 28 MiB lie in the heap from now on
    pieces = [torch.ones(2 << 20) for _ in range(20)]
    last = pieces.pop()  # holds the end of the heap
    del pieces
    before = process.memory_info().rss
    module_loader.return_memory()
    told.send((before - process.memory_info().rss) >> 20)
    del last


def test_freed_memory_goes_back() -> None:
    """A start frees as much as the model has, in pieces that glibc would keep. In a copy of this process, whose imports
    take longer than all else."""
    heard, told = multiprocessing.Pipe(duplex=False)
    copy = multiprocessing.get_context("fork").Process(target=freed, args=(told,))
    copy.start()
    assert heard.poll(60)
    assert heard.recv() > 100
    copy.join(600)
    assert copy.exitcode == 0


def test_mapped_weights_are_not_free_memory(tmp_path: Path) -> None:
    """The kernel counts a file's pages as available, a container's limit as used. Both are corrected."""
    assert builder._free_bytes(CPU, kept=0) - builder._free_bytes(CPU, kept=8 << 30) == pytest.approx(
        8 << 30, abs=2 << 30
    )
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 300\nactive_file 150\ninactive_file 200\n")
    assert builder._cgroup_free(tmp_path) == 650
    (tmp_path / "memory.max").write_text("max\n")
    assert builder._cgroup_free(tmp_path) == 2**62


def test_the_setting_says_where(tmp_path: Path) -> None:
    """A folder, the user's cache folder, or nowhere."""
    assert cache_of("off", 1.0) is None
    named = cache_of(str(tmp_path), 0.5)
    assert named == WeightCache(tmp_path, 1 << 29)
    standard = cache_of("auto", Settings(model="m").weight_cache_gib)
    assert standard is not None
    assert standard.folder == Path(os.environ["XDG_CACHE_HOME"]) / "tandem" / "weights"
