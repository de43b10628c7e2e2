#!/bin/sh
# On a machine with a GPU, after deploy/gpu/pack.sh: installs the wheels beside its own packages, and runs a command.
#   sh deploy/gpu/on_device.sh python3 -m loadtest device-kernels    every kernel against what it must equal
#   sh deploy/gpu/on_device.sh python3 -m loadtest device            steps, prefill and digests as shares of the floors
#   sh deploy/gpu/on_device.sh python3 -m loadtest device-handoff    a pair's handoff on it, against one worker alone
set -eu
cd "$(dirname "$0")/../.."
site=${TANDEM_SITE:-/tmp/tandem-site}
[ -d "$site" ] || python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" .whl/*.whl
export PYTHONPATH=".:$site" PYTHONUNBUFFERED=1
exec "$@"
