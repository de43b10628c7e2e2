"""The contract is clean and the committed code is generated from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_buf_finds_nothing_to_say() -> None:
    """The protos pass buf's STANDARD rules."""
    buf = Path(sys.executable).parent / "buf"
    out = subprocess.run([buf, "lint"], cwd=ROOT / "proto", capture_output=True, text=True, timeout=600, check=False)
    assert out.returncode == 0, out.stdout + out.stderr


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    """Generating again gives exactly what is committed; `make proto` after a change."""
    protos = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "proto/tandem/v1").glob("*.proto"))
    arguments = ["-I", "proto", *(f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "pyi"))]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments, *protos], cwd=ROOT, timeout=600, check=True)
    committed = {path.name: path.read_text() for path in (ROOT / "tandem/v1").glob("*_pb2*")}
    generated = {path.name: path.read_text() for path in (tmp_path / "tandem/v1").iterdir()}
    assert committed == generated


def test_no_client_message_can_name_a_worker_block_or_rank() -> None:
    """What a client sends has no field for a peer, an address, a block or a transfer."""
    from tandem.v1 import generation_pb2

    seen: set[str] = set()

    def walk(descriptor: object) -> None:
        for field in descriptor.fields:  # type: ignore[attr-defined]
            seen.add(field.name)
            if field.message_type:
                walk(field.message_type)

    walk(generation_pb2.GenerateRequest.DESCRIPTOR)
    words = ("worker", "address", "block", "rank", "transfer", "peer")
    assert not [name for name in seen if any(word in name for word in words)]
