"""The adapters that were loaded while the cluster runs, for all of its routers and workers.

    tandem:{<cluster>}:adapters     hash: name -> JSON of its LoadedAdapter; "#version" -> number of the last change

The version only grows. So a registry that restarts empty, or from an old snapshot, has an older version than the
processes that follow it, and they restore the list; a change that is based on an older version is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import time

import structlog
from pydantic import TypeAdapter

from cluster.state.registry import Registry
from tandem.errors import InvalidRequest, NotFound, TooLarge, Unavailable

log = structlog.get_logger(__name__)
KEY = "adapters"
VERSION = "#version"  # no adapter has this name
MAX_ADAPTERS = 1024

READ = "return redis.call('HGETALL', KEYS[1])"
_BEGIN = """
local version = tonumber(redis.call('HGET', KEYS[1], '#version') or '0')
if version < tonumber(ARGV[2]) then return 'behind' end
local function changed()
  version = redis.call('HINCRBY', KEYS[1], '#version', 1)
  redis.call('PUBLISH', ARGV[1], 'adapters')
  return tostring(version)
end
"""
ADD = (
    _BEGIN
    + """
if redis.call('HEXISTS', KEYS[1], ARGV[3]) == 1 then return 'taken' end
if redis.call('HLEN', KEYS[1]) > tonumber(ARGV[5]) then return 'full' end
redis.call('HSET', KEYS[1], ARGV[3], ARGV[4])
return changed()
"""
)
REMOVE = (
    _BEGIN
    + """
if redis.call('HDEL', KEYS[1], ARGV[3]) == 0 then return 'unknown' end
return changed()
"""
)
RESTORE = """
if tonumber(redis.call('HGET', KEYS[1], '#version') or '0') >= tonumber(ARGV[2]) then return 0 end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], '#version', ARGV[2], unpack(ARGV, 3))
redis.call('PUBLISH', ARGV[1], 'adapters')
return 1
"""


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    path: str  # its folder within each worker's `adapter_root`
    fingerprint: str  # hexadecimal, of its content
    loaded_at: float = field(default_factory=time)  # unix seconds

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.fingerprint)


@dataclass(frozen=True, slots=True)
class AdapterList:
    version: int = 0
    adapters: dict[str, LoadedAdapter] = field(default_factory=dict)  # by name


_ADAPTER = TypeAdapter(LoadedAdapter)


async def read(registry: Registry) -> AdapterList:
    """Raises Unavailable."""
    flat = await registry.run(KEY, READ, [])
    values = dict(zip(flat[::2], flat[1::2], strict=True))
    version = int(values.pop(VERSION.encode(), 0))
    adapters: dict[str, LoadedAdapter] = {}
    for name, text in sorted(values.items()):
        try:
            adapter = _ADAPTER.validate_json(text)
            assert adapter.digest
        except (ValueError, AssertionError) as error:
            log.error("adapters.unreadable", adapter=name.decode(errors="replace"), error=repr(error))
            continue
        adapters[name.decode()] = adapter
    return AdapterList(version, adapters)


async def add(registry: Registry, name: str, adapter: LoadedAdapter, known: AdapterList) -> int:
    """Returns the new version. `known`: the caller's list. Raises InvalidRequest for a name that is taken, TooLarge,
    Unavailable."""
    text = _ADAPTER.dump_json(adapter).decode()
    answer = await _change(registry, ADD, [name, text, MAX_ADAPTERS], known)
    if answer == "taken":
        raise taken(name)
    if answer == "full":
        raise TooLarge(
            f"{MAX_ADAPTERS} adapters are loaded; unload one first", field="name", bound=f"{MAX_ADAPTERS} adapters"
        )
    return int(answer)


async def remove(registry: Registry, name: str, known: AdapterList) -> int:
    """Returns the new version. `known`: the caller's list. Raises NotFound, Unavailable."""
    answer = await _change(registry, REMOVE, [name], known)
    if answer == "unknown":
        raise unknown(name)
    return int(answer)


async def restore(registry: Registry, known: AdapterList) -> None:
    """Writes the list back to a registry that has lost it. Raises Unavailable."""
    flat: list[str] = []
    for name, adapter in known.adapters.items():
        flat += [name, _ADAPTER.dump_json(adapter).decode()]
    await registry.run(KEY, RESTORE, [known.version, *flat])


async def _change(registry: Registry, script: str, args: list[str | int], known: AdapterList) -> str:
    for _ in range(2):
        answer = (await registry.run(KEY, script, [known.version, *args])).decode()
        if answer != "behind":
            return str(answer)
        await restore(registry, known)
    raise Unavailable("the registry keeps losing the list of adapters", reason="REGISTRY_BEHIND", retry_after=1.0)


def taken(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"the adapter {name!r:.140} has already been loaded; unload it first", field="name", bound="a name that is free"
    )


def unknown(name: str) -> NotFound:
    return NotFound(f"the adapter {name!r:.140} cannot be found; none of that name was loaded", field="name")
