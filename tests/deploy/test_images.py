"""The images of this checkout, if `make images-test` has built them, and the stand-in for a cluster."""

from __future__ import annotations

import copy

import pytest

from tests.deploy.chart import NAME
from tests.deploy.images import build, release
from tests.deploy.images.node import manifest, secrets_of
from tests.deploy.test_chart import pods


def why_not() -> str:
    """The reason why the images cannot be run here; empty if they can."""
    if lacks := build.missing():
        return lacks
    old = [image for image in build.IMAGES if build.stale(image)] if build.STORE.is_dir() else build.IMAGES
    return f"`make images-test` has not built {', '.join(old)} of this checkout" if old else ""


@pytest.mark.timeout(240)
def test_pods_of_the_chart_run_from_the_images() -> None:
    """Pods run as user 10001 without a capability, with compiled operators, through both pools, over gRPC and HTTP.
    Building the images takes too long for a suite: `make images-test` builds them, and kills and deletes pods in
    mid-stream."""
    if reason := why_not():
        pytest.skip(reason)
    with release.played(print) as running:
        for step in (release.requests, release.hardened, release.executed):
            print(step(running))


def test_what_is_played_is_what_the_chart_says() -> None:
    """Commands, images, limits and security of the manifests are passed to podman unchanged, with few exceptions."""
    documents = release.manifests()
    keys = secrets_of(documents)
    for name, template in pods(documents):
        before = copy.deepcopy(template)
        played = manifest(template, f"{name}-a", "10.89.70.9", {f"{NAME}-tandem-router": "10.89.70.3"}, keys)
        assert template == before
        spec = played["spec"] if played["kind"] == "Pod" else played["spec"]["template"]["spec"]
        (ours,), (theirs,) = spec["containers"], template["spec"]["containers"]
        for key in ("image", "resources", "securityContext"):
            assert ours.get(key) == theirs.get(key), key
        words = [*zip(ours["command"], theirs["command"], strict=True)]
        words += zip(ours.get("args", []), theirs.get("args", []), strict=True)
        assert all(one == other or "$(" in other for one, other in words)
        assert "$(" not in str(ours)
        assert spec["securityContext"] == template["spec"]["securityContext"]
        changed = {one["name"] for one, other in zip(ours["env"], theirs["env"], strict=True) if one != other}
        assert changed <= {"POD_NAME", "POD_IP", "TANDEM_ADVERTISE_HOST", "TANDEM_REDIS"}
        dropped = {one["mountPath"] for one in theirs["volumeMounts"] if one not in ours["volumeMounts"]}
        assert dropped <= {"/dev/shm"}


def test_images_of_other_sources_are_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image's digest covers every file that it copies, so an old image is skipped with a reason, and never tested
    instead of this code."""
    found = {image: build.sources(image) for image in build.IMAGES}
    assert len({*found.values()}) == len(build.IMAGES)
    read = build._copied

    def without_last(dockerfile):  # type: ignore[no-untyped-def]
        return sorted(read(dockerfile))[:-1]

    monkeypatch.setattr(build, "_copied", without_last)
    assert all(build.sources(image) != digest for image, digest in found.items())
