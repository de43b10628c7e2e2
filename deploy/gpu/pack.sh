#!/bin/sh
# Fetches into .whl/ what a machine with a GPU but without a network lacks: wheels of requirements.lock's versions, for
# CPython 3.12 on x86-64. It has torch for CUDA with Triton, and transformers. Copy the repository there with .whl/, and
# run deploy/gpu/on_device.sh.
set -eu
cd "$(dirname "$0")/../.."
missing='structlog|xgrammar|apache-tvm-ffi|pydantic|pydantic_core|pydantic-settings|python-dotenv|annotated-types|typing-inspection'
rm -rf .whl
grep -E "^($missing)==" requirements.lock | cut -d' ' -f1 | xargs "${PYTHON:-python3}" -m pip download --quiet --no-deps \
  --only-binary=:all: --python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 \
  --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d .whl
du -sh .whl
