"""Weights as the operators read them, in files that all workers of a host map: one copy in memory, made once.

    key = what is kept: the operators' library, and the type, shape and digest of each weight
    file: header (key, length, digest of the body) | padding to 2 MiB | body

The key describes the content and not its origin, so an edited checkpoint, another dtype or another machine has another
file. A file is used only if it belongs to this user, no other user may write to it, and its length, its header and the
digest of its whole body are right; otherwise it is created again. A process that cannot use the cache keeps its weights
in its own memory and logs that. The digests (xxh3_128) detect faults and mix-ups. They are not keyed, so they do not
stop a checkpoint that was made to collide with another one.

A mapped file is read in large memory pages where the file system caches it in such pages (ext4 and XFS on recent
kernels). For that it is written in large pieces, and the body begins at the boundary of a large page.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import shutil
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
import xxhash
from filelock import FileLock

log = logging.getLogger(__name__)

BODY = 2 << 20  # where the body begins, bytes: a large page
PIECE = 16 << 20  # written at once, bytes
ALIGNMENT = 4096  # of each tensor in a body, bytes: a page
# Names of files; no other file of the folder is ever touched.
KEPT, PARTIAL, NOTE = ".tandem-weights", ".tandem-partial", ".tandem-note"
NOTES = 64  # the notes written last that are kept
MAGIC = "tandem weights 1"
LOCK_TIMEOUT_S = 120.0  # longest wait for another process that writes


@dataclass(frozen=True)
class WeightCache:
    """A folder of such files, of at most `limit` bytes in total; the least recently used are removed first."""

    folder: Path
    limit: int

    def get(
        self, key: str, sizes: Sequence[int], make: Callable[[], Iterable[torch.Tensor]]
    ) -> list[torch.Tensor] | None:
        """The tensors stored under `key`: uint8, of `sizes` bytes, read-only, and mapped while one of them exists.

        If there are none, `make` creates them, of any type. None when they cannot be stored; the log says why. One
        process of a host writes at a time, and the others wait for it.
        """
        starts, nbytes = placed(sizes)
        body = self._get(key, nbytes, lambda: _padded(make(), sizes))
        return None if body is None else [body[at : at + size] for at, size in zip(starts, sizes, strict=True)]

    def note(self, key: str, make: Callable[[], str]) -> str:
        """The text stored under `key`; if there is none, `make` creates it, in one process of a host at a time.

        A text that cannot be stored is created each time; the log says why.
        """
        if (stored := self._read_note(key)) is not None:
            return stored
        text: str | None = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with FileLock(self.folder / "tandem.lock", timeout=LOCK_TIMEOUT_S):
                if (stored := self._read_note(key)) is not None:  # another process was quicker
                    return stored
                text = make()
                self._write_note(key, text)
        except (OSError, NotImplementedError) as error:
            log.warning("what was measured at load is not kept in %s: %s", self.folder, error)
        return make() if text is None else text

    def _read_note(self, key: str) -> str | None:
        """The stored text; None if there is none, or if it is damaged or writable by other users."""
        try:
            with open(self.folder / f"{key}{NOTE}", encoding="utf-8") as file:
                if _others_may_write(os.fstat(file.fileno())):
                    return None
                kept = json.loads(file.read())
        except (OSError, ValueError):
            return None
        is_right = isinstance(kept, dict) and kept == _note(key, str(kept.get("text")))
        return kept["text"] if is_right else None

    def _write_note(self, key: str, text: str) -> None:
        """Under the lock."""
        partial = self.folder / f"{key}.{os.getpid()}{PARTIAL}"
        try:
            with open(partial, "x", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                json.dump(_note(key, text), file)
            os.replace(partial, self.folder / f"{key}{NOTE}")
        finally:
            partial.unlink(missing_ok=True)
        for old in sorted(self.folder.glob(f"*{NOTE}"), key=lambda path: path.stat().st_mtime)[:-NOTES]:
            old.unlink()

    def _get(self, key: str, nbytes: int, body: Callable[[], Iterable[torch.Tensor]]) -> torch.Tensor | None:
        try:
            if (mapped := self._open(key, nbytes)) is not None:
                return mapped
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with FileLock(self.folder / "tandem.lock", timeout=LOCK_TIMEOUT_S):
                if (mapped := self._open(key, nbytes)) is not None:  # another process was quicker
                    return mapped
                self._make_room(BODY + nbytes)
                self._write(key, nbytes, body())
            mapped = self._open(key, nbytes)
            if mapped is None:
                log.warning("weights written to %s read back differently", self.folder)
            return mapped
        except (OSError, NotImplementedError, NoRoom) as error:
            log.warning("weights are not kept in %s, each worker has its own: %s", self.folder, error)
            return None

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{KEPT}"

    def _open(self, key: str, nbytes: int) -> torch.Tensor | None:
        path = self._path(key)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            wrong, mapped = _read(descriptor, key, nbytes)
        finally:
            os.close(descriptor)
        if mapped is None:
            log.warning("%s is not used, it will be made again: %s", path, wrong)
            return None
        with suppress(OSError):  # a cache that cannot be written can still be read
            os.utime(path)
        return mapped

    def _make_room(self, size: int) -> None:
        """Under the lock. Raises NoRoom when `size` bytes cannot be kept."""
        for left in self.folder.glob(f"*{PARTIAL}"):  # of a killed process: a live writer holds the lock
            left.unlink(missing_ok=True)
        if size > self.limit:
            raise NoRoom(f"they take {size >> 20} MiB, the limit is {self.limit >> 20} MiB")
        kept = sorted(self.folder.glob(f"*{KEPT}"), key=lambda path: path.stat().st_mtime)
        total = sum(path.stat().st_size for path in kept)
        for path in kept:
            if total + size <= self.limit:
                break
            total -= path.stat().st_size
            path.unlink()  # processes that have it mapped keep it
        if shutil.disk_usage(self.folder).free < 2 * size:
            raise NoRoom(f"the disk has less than {2 * size >> 20} MiB left")

    def _write(self, key: str, nbytes: int, body: Iterable[torch.Tensor]) -> None:
        partial = self.folder / f"{key}.{os.getpid()}{PARTIAL}"
        try:
            with open(partial, "xb", buffering=0, opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.seek(BODY)
                digest = xxhash.xxh3_128()
                for piece in _pieces(body):
                    digest.update(piece)
                    _write_all(file.fileno(), piece)
                file.seek(0)
                _write_all(file.fileno(), memoryview(_header(key, nbytes, digest.hexdigest())))
            os.replace(partial, self._path(key))
        finally:
            partial.unlink(missing_ok=True)


class NoRoom(Exception):
    """The cache's limit, or the disk, does not hold it."""


def _note(key: str, text: str) -> dict[str, str]:
    return {"what": MAGIC, "key": key, "text": text, "digest": xxhash.xxh3_128(text.encode()).hexdigest()}


def _header(key: str, nbytes: int, digest: str) -> bytes:
    text = json.dumps({"what": MAGIC, "key": key, "bytes": nbytes, "digest": digest})
    return text.encode() + b"\n"


def _read(descriptor: int, key: str, nbytes: int) -> tuple[str, torch.Tensor | None]:
    """(what is wrong with an open file, None), or ("", its body)."""
    stat = os.fstat(descriptor)
    if _others_may_write(stat):
        return "other users may write to it", None
    if not _is_complete(stat, nbytes):
        return f"it has {stat.st_size} bytes instead of {BODY + nbytes}", None
    header = os.pread(descriptor, 4096, 0).partition(b"\n")[0] + b"\n"
    mapping = mmap.mmap(descriptor, stat.st_size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # optional: the kernel may lack it
            mapping.madvise(mmap.MADV_HUGEPAGE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about a read-only buffer, which is intended
        body = torch.frombuffer(mapping, dtype=torch.uint8, offset=BODY)
    if header != _header(key, nbytes, xxhash.xxh3_128(body.numpy().data).hexdigest()):
        return "its header or its content is damaged", None
    return "", body


def _others_may_write(stat: os.stat_result) -> bool:
    return stat.st_uid != os.geteuid() or stat.st_mode & 0o022 != 0


def _is_complete(stat: os.stat_result, nbytes: int) -> bool:
    return stat.st_size == BODY + nbytes


def placed(sizes: Sequence[int]) -> tuple[list[int], int]:
    """The offsets of parts of these sizes in their concatenation, and its size."""
    ends = list(accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes))
    return [0, *ends][:-1], ends[-1] if ends else 0


def _padded(parts: Iterable[torch.Tensor], sizes: Sequence[int]) -> Iterator[torch.Tensor]:
    for part, size in zip(parts, sizes, strict=True):
        if part.nbytes != size:
            raise AssertionError(f"{part.nbytes} bytes where {size} were announced")
        yield part.contiguous().view(-1).view(torch.uint8)
        yield torch.zeros(-size % ALIGNMENT, dtype=torch.uint8)


def _pieces(body: Iterable[torch.Tensor]) -> Iterator[memoryview]:
    """The same bytes in pieces of `PIECE` bytes."""
    buffer, used = torch.empty(PIECE, dtype=torch.uint8), 0
    view = buffer.numpy().data
    for part in body:
        for piece in torch.split(part, PIECE):
            at = min(piece.numel(), PIECE - used)
            buffer[used : used + at] = piece[:at]
            used += at
            if used == PIECE:
                yield view
                used = piece.numel() - at
                buffer[:used] = piece[at:]
    yield view[:used]


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def digest_of(tensor: torch.Tensor) -> str:
    """Of its type, shape and elements."""
    elements = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return f"{tensor.dtype}{tuple(tensor.shape)}{xxhash.xxh3_128(elements.data).hexdigest()}"


def file_backed(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Which of these CPU tensors lie in a mapped file, whose memory is that of the page cache."""
    ranges: list[tuple[int, int]] = []
    try:
        with open("/proc/self/maps") as lines:
            for line in lines:
                span, _, _, _, inode, *_ = line.split()
                if inode != "0":
                    start, end = (int(bound, 16) for bound in span.split("-"))
                    ranges.append((start, end))
    except OSError:  # no /proc here
        return [False] * len(tensors)
    starts = [start for start, _ in ranges]
    backed = []
    for tensor in tensors:
        at = bisect_right(starts, tensor.data_ptr()) - 1
        backed.append(at >= 0 and tensor.data_ptr() < ranges[at][1])
    return backed


def default_folder() -> Path:
    """In the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).expanduser() / "tandem" / "weights"


def cache_of(where: str, gib: float) -> WeightCache | None:
    """As the settings weight_cache and weight_cache_gib ask for it; None: off."""
    if where == "off":
        return None
    return WeightCache(default_folder() if where == "auto" else Path(where).expanduser(), int(gib * 2**30))
