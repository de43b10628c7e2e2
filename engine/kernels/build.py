"""Builds the compiled operators: `python -m engine.kernels.build`, which `make setup` calls. Takes half a minute once.

The library lies in `_build/` beside this file, under a name made of what it depends on: the source, torch, the
compiler's options and this machine's instruction set. Where no library has that name, none is loaded.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch
from torch.utils import cpp_extension

HERE = Path(__file__).parent
HEADERS = ("attention.h", "dots.h", "functions.h", "ops.h", "tile_panels.h", "tiles.h")
SOURCES = (
    "attention.cpp",
    "invariant.cpp",
    "lora.cpp",
    "lowbit.cpp",
    "products.cpp",
    "rows.cpp",
    "sampling.cpp",
    "tile_attention.cpp",
    "tiles.cpp",
)
OPTIONS = (
    "-std=c++20",
    "-O3",
    "-march=native",
    "-fPIC",
    "-fopenmp",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-DNDEBUG",
    "-Wno-psabi",
)

_TRIAL = "import sys, torch; torch.ops.load_library(sys.argv[1]); print(torch.ops.tandem.isa())"


def library() -> Path:
    """Where the library for these sources, this torch and this machine is, or would be."""
    digest = hashlib.sha256()
    for source in (*HEADERS, *SOURCES):
        digest.update((HERE / source).read_bytes())
    digest.update(repr((torch.__version__, OPTIONS, platform.machine(), _instruction_set())).encode())
    return HERE / "_build" / f"tandem-{digest.hexdigest()[:16]}.so"


def build() -> Path:
    """Compiles the library unless it is there. Raises CalledProcessError or FileNotFoundError (no compiler)."""
    target = library()
    if target.exists():
        return target
    target.parent.mkdir(exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}")
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    objects = [partial.with_suffix(f"{partial.suffix}.{source}.o") for source in SOURCES]
    try:
        compilers = [
            subprocess.Popen([*compiler, *OPTIONS, abi, *includes, "-c", str(HERE / source), "-o", str(into)])
            for source, into in zip(SOURCES, objects, strict=True)
        ]
        codes = [each.wait() for each in compilers]
        if any(codes):
            raise subprocess.CalledProcessError(max(codes, key=abs), compiler)
        # Without -fopenmp here: the OpenMP calls then go to the one runtime that torch has loaded, not to a second one.
        link = [*compiler, "-shared", *map(str, objects), *libraries, "-ltorch_cpu", "-lc10", "-o", str(partial)]
        subprocess.run(link, check=True)
        # A library that cannot be loaded, for a symbol that this torch lacks, must not be found by a worker.
        subprocess.run([sys.executable, "-c", _TRIAL, str(partial)], check=True)
        os.replace(partial, target)
    finally:
        for each in (*objects, partial):
            each.unlink(missing_ok=True)
    return target


def _instruction_set() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), "")


def main() -> int:
    """Returns the exit code."""
    try:
        path = build()
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"the compiled operators cannot be built, plain PyTorch will serve: {error}", file=sys.stderr)
        return 1
    print(f"compiled operators: {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
