"""Changes the product one line at a time and looks whether the tests that should notice do.

    python -m tests.mutation [--module PART]... [--sample 40] [--seconds 600] [--seed 1] [--json FILE] [--again FILE]

For each module of tests/mutation/targets.py (or those whose path has PART in it) a random sample of its mutants is
tested, each in a copy of the tree: the module's test files, up to the first failure, within a multiple of the time that
they take without a change. Prints the share that was killed (failed, or took too long) of those that are not known to
be equivalent, and the survivors as diffs. Exits 1 when less than 85 % were killed in all. `--again` tests only the
survivors that an earlier run wrote into its JSON file, to see what new tests kill.

Third-party libraries are imported once, and each mutant is tested in a fork of that process. The copy has bytecode of
everything but the changed module, and hypothesis does not shrink what it finds: only the failure counts.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import hypothesis
import psutil
from hypothesis import Phase

from tests.mutation.mutants import Mutant, lines_of, mutants, read
from tests.mutation.targets import EQUIVALENT, TARGETS

ROOT = Path(__file__).parents[2]
WANTED = 0.85
FACTOR, MARGIN_S = 3.0, 15.0  # of the time without a change
UNCHANGED_S = 400.0
# None of ours: a fork must import the changed module by itself.
PRELOADED = (
    "torch",
    "torch._dynamo",
    "transformers.core_model_loading",
    "numpy",
    "grpc",
    "pytest",
    "_pytest.assertion.rewrite",
    "hypothesis",
    "structlog",
    "pydantic",
    "redis",
    "prometheus_client",
    "pydantic_settings",
    "uvicorn",
    "xgrammar",
)
KILLED, SURVIVED, LATE, EQUAL = "killed", "survived", "killed by time", "equivalent"


@dataclass
class Result:
    module: str
    possible: int
    counts: Counter[str] = field(default_factory=Counter)
    survivors: list[Mutant] = field(default_factory=list)

    @property
    def killed(self) -> int:
        return self.counts[KILLED] + self.counts[LATE]

    @property
    def tested(self) -> int:
        return self.killed + self.counts[SURVIVED]

    def to_dict(self) -> dict[str, object]:
        survivors = [one.diff for one in self.survivors]
        return {"module": self.module, "possible": self.possible, **self.counts, "survivors": survivors}

    def __str__(self) -> str:
        share = f"{self.killed / self.tested:.0%}" if self.tested else "-"
        return f"{self.module}: {share} of {self.tested} killed ({self.counts[LATE]} by time), {self.possible} possible"


class Copy:
    """The tree, in which one file at a time is changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
        )
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        if (built := ROOT / "engine/kernels/_build").exists():
            shutil.copytree(built, folder / "engine/kernels/_build")

    def passes(self, module: str, code: str, files: tuple[str, ...], seconds: float) -> bool | None:
        """Whether these tests pass with this code in the place of the module; None when they take too long."""
        path = self.folder / module
        before = path.read_text(encoding="utf-8")
        path.write_text(code, encoding="utf-8")
        try:
            return self._test(files, seconds, unchanged=code == before)
        finally:
            path.write_text(before, encoding="utf-8")

    def _test(self, files: tuple[str, ...], seconds: float, unchanged: bool) -> bool | None:
        process = multiprocessing.get_context("fork").Process(target=_pytest, args=(self.folder, files, unchanged))
        process.start()
        process.join(seconds)
        late = process.is_alive()
        _end(process.pid or 0)
        process.join()
        return None if late else process.exitcode == 0


def _pytest(folder: Path, files: tuple[str, ...], unchanged: bool) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)
    if not unchanged:
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = True
    hypothesis.settings.register_profile(
        "mutation", database=None, max_examples=50, phases=(Phase.explicit, Phase.generate)
    )
    hypothesis.settings.load_profile("mutation")
    sys.path[:] = [str(folder), *(one for one in sys.path if one not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "tandem")]:
        del sys.modules[name]
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    code = int(
        importlib.import_module("pytest").main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *files])
    )
    os._exit(code)


def _end(pid: int) -> None:
    """The process with all that it has started."""
    with suppress(psutil.NoSuchProcess):
        whole = psutil.Process(pid)
        for one in [*whole.children(recursive=True), whole]:
            with suppress(psutil.NoSuchProcess):
                one.kill()
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def test_module(copy: Copy, module: str, args: argparse.Namespace) -> Result:
    code, files = read(ROOT, module), TARGETS[module]
    all_of_it = mutants(module, code, random.Random(f"{args.seed}/{module}"))
    result = Result(module, len(all_of_it))
    if args.again:
        survivors = _survivors(args.again)
        all_of_it = [mutant for mutant in all_of_it if mutant.lines in survivors]
    if not all_of_it:
        return result
    began = monotonic()
    if not copy.passes(module, code, files, UNCHANGED_S):
        print(f"{module}: its tests fail without a change, or take too long: {' '.join(files)}", flush=True)
        return result
    seconds = FACTOR * (monotonic() - began) + MARGIN_S
    began = monotonic()
    for mutant in all_of_it:
        if result.tested >= args.sample or monotonic() > began + args.seconds:
            break
        if mutant.lines in EQUIVALENT:
            result.counts[EQUAL] += 1
            continue
        passes = copy.passes(module, mutant.code, files, seconds)
        result.counts[LATE if passes is None else SURVIVED if passes else KILLED] += 1
        if passes:
            result.survivors.append(mutant)
            print(f"survived, {mutant.kind}:\n{mutant.diff}", flush=True)
    print(result, flush=True)
    return result


def _survivors(file: Path) -> set[tuple[str, str, str]]:
    modules = json.loads(file.read_text(encoding="utf-8"))["modules"]
    return {lines_of(one["module"], diff) for one in modules for diff in one["survivors"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--module", action="append", metavar="PART", help="of the path; may be repeated")
    parser.add_argument("--sample", type=int, default=40, help="mutants of each module at most")
    parser.add_argument("--seconds", type=float, default=600.0, help="for each module, about")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--again", type=Path, metavar="FILE", help="only the survivors that this file of --json has")
    args = parser.parse_args()
    chosen = [name for name in TARGETS if not args.module or any(part in name for part in args.module)]
    if not chosen:
        parser.error(f"no such module; there are {', '.join(TARGETS)}")
    for name in PRELOADED:
        importlib.import_module(name)
    results = []
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy = Copy(Path(folder))
        for name in chosen:
            results.append(test_module(copy, name, args))
            if args.json:
                about = [one.to_dict() for one in results]
                args.json.write_text(json.dumps({"seed": args.seed, "modules": about}, indent=1))
    tested, killed = sum(one.tested for one in results), sum(one.killed for one in results)
    print("\n".join(map(str, results)))
    print(f"in all {killed / max(1, tested):.1%} of {tested} killed, wanted {WANTED:.0%}")
    return 0 if killed >= WANTED * tested else 1


if __name__ == "__main__":
    sys.exit(main())
