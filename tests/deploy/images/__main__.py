"""`make images-test`: builds the images of this checkout, runs the chart's laptop example from them, and uses it.

    python -m tests.deploy.images [--base IMAGE] [--build-only] [--device cuda13] [--remove]

Needs root and Debian's packages podman, buildah, runc, catatonit, containernetworking-plugins, and debootstrap unless
--base names an image with Python 3.11. Images and their layers stay in the folder of the user's cache that is printed,
where tests/deploy/test_images.py finds them; --remove deletes it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time

from tests.deploy.images import build, release


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="make images-test", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--base", help="the image to build on; made by debootstrap if absent")
    parser.add_argument("--build-only", action="store_true", help="build, play nothing")
    parser.add_argument("--device", default=build.TAG, choices=build.DEVICES, help="cuda13 is built and not played")
    parser.add_argument("--remove", action="store_true", help="delete the images at the end")
    args = parser.parse_args()
    if lacks := build.missing():
        print(f"images-test: {lacks}", file=sys.stderr)
        return 1
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {line}", flush=True)

    build.STORE.mkdir(parents=True, exist_ok=True)
    base = args.base or build.base(say)
    rows = [f"base    {build.size_gb(base):5.2f} GB  {base}"]
    for image in build.IMAGES if args.device == build.TAG else ("worker",):
        since = time.monotonic()
        if args.base or build.stale(image, args.device):
            build.build(image, base, args.device, say)
        rows.append(
            f"{image:7} {build.size_gb(build.name(image, args.device)):5.2f} GB  {time.monotonic() - since:.0f} s"
        )
    if not args.build_only and args.device == build.TAG:
        with release.played(say) as running:
            for step in release.STEPS:
                since = time.monotonic()
                say(step(running))
                rows.append(f"{step.__name__:16} {time.monotonic() - since:5.1f} s  passed")
        say("removed: no pod, volume, Secret or network is left")
    if args.remove:
        shutil.rmtree(build.STORE)
    say("\n" + "\n".join(rows) + f"\nimages: {'removed' if args.remove else build.STORE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
