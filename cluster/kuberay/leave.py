"""`python -m cluster.kuberay.leave`: the preStop hook of a pod that is a node of Ray.

    Kubernetes deletes or evicts the pod ─▶ this hook ─▶ Ray: the node drains, and gets no more actors
        the supervisor sees that ─▶ its worker drains, while another one starts elsewhere
        the raylet has no actor left ─▶ it ends by itself ─▶ this hook ends ─▶ SIGTERM for the rest of the pod

It repeats the request, because the head may have been evicted with this pod and be starting elsewhere. Without a head
the pod ends after its grace as in a crash: its streams continue elsewhere.
"""

from __future__ import annotations

import sys
from time import monotonic, sleep

from cluster.ray_nodes import Gcs
from tandem import settings as tandem_settings
from tandem.errors import SettingsError, TandemError, Unavailable
from tandem.settings import Settings

AGAIN_S = 1.0
MARGIN_S = 10.0
"""Beyond drain_grace_s: until the supervisor has noticed, and the cut requests have freed their blocks."""


def main() -> int:
    """Returns 0 if the node has ended, 1 if it has not after drain_grace_s and MARGIN_S."""
    try:
        settings = tandem_settings.load()
        if settings.ray_address is None or settings.advertise_host is None:
            raise SettingsError(
                "ray_address and advertise_host say which node of which Ray ends", field="ray_address", bound="set"
            )
        return 0 if leave(settings, settings.ray_address, settings.advertise_host) else 1
    except TandemError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1


def leave(settings: Settings, ray_address: str, node: str) -> bool:
    """Whether the node with this address has ended in time."""
    gcs, deadline = Gcs(ray_address), monotonic() + settings.drain_grace_s + MARGIN_S
    while (left := deadline - monotonic()) > 0:
        try:
            if not gcs.drain(node, left):
                return True
        except Unavailable as error:
            print(error.message, file=sys.stderr, flush=True)
        sleep(AGAIN_S)
    return False


if __name__ == "__main__":
    sys.exit(main())
