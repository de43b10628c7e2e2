"""The clusters in the registry that one `tandem up` supervises: one, or one for the routers and one for each model."""

from __future__ import annotations

from cluster.state.lease import Lease
from cluster.state.registry import Registry
from tandem.checkpoint import check_adapter, check_adapter_root, folder_of
from tandem.model_settings import model_of, settings_of_models
from tandem.settings import Settings


def supervised_clusters(settings: Settings) -> list[tuple[Settings, dict[str, int]]]:
    """The settings and the wanted sizes of each supervisor: one for all pools of a single model; with several models,
    one for the routers and one for the pools of each model."""
    routers = {"router": settings.routers}
    if not settings.models:
        return [(settings, {**routers, "prefill": settings.prefill, "decode": settings.decode})]
    models = settings_of_models(settings).values()
    routing = settings.model_copy(update={"autoscale": "off", "spares": 0})
    return [(routing, routers), *((own, {"prefill": own.prefill, "decode": own.decode}) for own in models)]


def pool_name(settings: Settings, role: str) -> str:
    """The pool's name in `tandem workers` and `tandem scale`."""
    model = model_of(settings.cluster)
    return f"{model}/{role}" if model else role


async def want(settings: Settings, run_id: str, sizes: dict[str, int]) -> None:
    """Writes the wanted sizes before the supervisor starts. Takes the lease first: another supervisor of this cluster
    would follow them as well."""
    registry = Registry(settings.redis or "", settings.cluster, settings.heartbeat_ttl_s)
    try:
        await Lease(registry, run_id).take()
        await registry.set_wanted(sizes)
    finally:
        await registry.close()


def check_folders(settings: Settings) -> None:
    """Raises NotFound, CheckpointRefused or SettingsError for a missing model or adapter."""
    folder_of(settings.model)
    for name, folder in settings.adapters.items():
        check_adapter(name, folder)
    if settings.adapter_root is not None:
        check_adapter_root(settings.adapter_root)
