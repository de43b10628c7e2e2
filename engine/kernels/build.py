"""Builds the compiled operators: `python -m engine.kernels.build`, which `make setup` calls. Takes minutes, once.

    python -m engine.kernels.build                the best level that this machine has
    python -m engine.kernels.build --level avx2   that one
    python -m engine.kernels.build --all          every level that the compiler knows, for an image

There is one library for each level of instruction sets; the loader compares the processor with the level's
requirements. In a checkout and in an image a library is in `_build/` next to this file; where Tandem is installed from
a wheel it is in the user's cache, and the first worker that needs it compiles it. Its name is a hash of the sources,
torch and the level's options, independent of the machine that built it. A library with another name is never loaded.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

log = logging.getLogger(__name__)

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "tandem" / "operators"
INSTALLED = not (HERE.parents[1] / "pyproject.toml").is_file()
FOLDER = CACHE if INSTALLED else HERE / "_build"
BUILT_S = 900.0  # for another process that compiles the same
HEADERS = tuple(sorted(path.name for path in HERE.glob("*.h")))
SOURCES = tuple(sorted(path.name for path in HERE.glob("*.cpp")))
OPTIONS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-DNDEBUG",
    "-Wno-psabi",
)
NATIVE = "native"


@dataclass(frozen=True)
class Level:
    """The flags of /proc/cpuinfo that a processor must have, and the compiler's options to use them."""

    flags: frozenset[str]
    options: tuple[str, ...]


_V3 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})  # abm is LZCNT
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
# Not the builder's own processor: GCC 12's generic schedule makes products of 8 rows 5 to 15 % slower than this one.
_AVX512 = ("-march=x86-64-v4", "-mtune=icelake-server")
# The best first. The sources ask for AVX2 with FMA, AVX-512 (F, BW, DQ, VL), AVX512_BF16 and, for narrow weights, VBMI.
LEVELS = {
    "avx512_bf16": Level(_V4 | {"avx512_bf16", "avx512vbmi"}, (*_AVX512, "-mavx512bf16", "-mavx512vbmi")),
    "avx512": Level(_V4, _AVX512),
    "avx2": Level(_V3, ("-march=x86-64-v3",)),
    NATIVE: Level(frozenset(), ("-march=native",)),  # any other machine: for exactly the processor that builds it
}

_TRIAL = "import sys, torch; torch.ops.load_library(sys.argv[1]); print(torch.ops.tandem.isa())"


def processor() -> frozenset[str]:
    """The flags of the first processor in /proc/cpuinfo; empty without this file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return frozenset(flags.partition(":")[2].split())


def runnable() -> list[str]:
    """The levels that this machine's processor has, the best first."""
    here = processor()
    return [name for name, level in LEVELS.items() if level.flags <= here]


def library(level: str) -> Path:
    """Where the library of this level for these sources and this torch is, or would be."""
    digest = hashlib.sha256()
    for source in (*HEADERS, *SOURCES):
        digest.update((HERE / source).read_bytes())
    digest.update(repr((torch.__version__, OPTIONS, LEVELS[level].options)).encode())
    if level == NATIVE:
        digest.update(repr(sorted(processor())).encode())
    return FOLDER / f"tandem-{level}-{digest.hexdigest()[:16]}.so"


def known(level: str) -> bool:
    """Whether the compiler has the level's options. Raises FileNotFoundError without a compiler."""
    command = [*_compiler(), *LEVELS[level].options, "-fsyntax-only", "-xc++", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def build(level: str) -> Path:
    """Compiles the library of a level unless it is there. Raises CalledProcessError, OSError without a compiler."""
    target = library(level)
    if target.exists():
        return target
    from torch.utils import cpp_extension  # it imports setuptools, and each worker imports this module

    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}")
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    options = [*OPTIONS, *LEVELS[level].options, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    compiler = _compiler()
    objects = [partial.with_suffix(f"{partial.suffix}.{source}.o") for source in SOURCES]
    try:
        compilers = [
            subprocess.Popen([*compiler, *options, *includes, "-c", str(HERE / source), "-o", str(into)])
            for source, into in zip(SOURCES, objects, strict=True)
        ]
        codes = [each.wait() for each in compilers]
        if any(codes):
            raise subprocess.CalledProcessError(max(codes, key=abs), compiler)
        # Without -fopenmp here: the OpenMP calls then go to the one runtime that torch has loaded, not to a second one.
        link = [*compiler, "-shared", *map(str, objects), *libraries, "-ltorch_cpu", "-lc10", "-o", str(partial)]
        subprocess.run(link, check=True)
        if level in runnable():
            _try(partial, level)
        os.replace(partial, target)
    finally:
        for each in (*objects, partial):
            each.unlink(missing_ok=True)
    return target


def at_first_use() -> None:
    """Compiles the best level of this machine, one process at a time. After a failure plain PyTorch serves."""
    from filelock import FileLock, Timeout  # only an installation from a wheel needs it

    try:
        FOLDER.mkdir(parents=True, exist_ok=True)
        with FileLock(FOLDER / ".lock", timeout=BUILT_S):
            level = next((level for level in runnable() if known(level)), NATIVE)
            if not library(level).exists():
                log.warning("compiling the operators of level %s into %s: some minutes, once", level, FOLDER)
                build(level)
    except (OSError, subprocess.CalledProcessError, Timeout) as error:
        log.warning("the compiled operators cannot be built: %s", error)


def _try(path: Path, level: str) -> None:
    """A library that cannot be loaded, for a symbol that this torch lacks, must not be found by a worker. Only on a
    machine that has the level: elsewhere already the first of its instructions may end the process."""
    command = [sys.executable, "-c", _TRIAL, str(path)]
    compiled_level = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    if compiled_level != level and level != NATIVE:
        raise OSError(f"the library of level {level} was compiled for {compiled_level}")


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "c++"))


def _wanted(args: argparse.Namespace) -> list[str]:
    if args.level:
        return [args.level]
    if args.all:
        return [level for level in LEVELS if level != NATIVE and known(level)] or [NATIVE]
    return [next((level for level in runnable() if known(level)), NATIVE)]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--level", choices=LEVELS)
    which.add_argument("--all", action="store_true", help="every level that the compiler knows")
    args = parser.parse_args(argv)
    try:
        for level in _wanted(args):
            print(f"compiled operators: {build(level).name}")
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"the compiled operators cannot be built, plain PyTorch will serve: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
