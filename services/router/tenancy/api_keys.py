"""The keys of the router's clients, in a file that is read again when it changes.

    NAME KEY                          may generate
    NAME KEY metrics                  may also read the router's metrics over HTTP
    NAME KEY admin                    likewise, and scale, drain and inspect the cluster
    NAME KEY requests=8               has at most 8 requests in progress
    NAME KEY tokens_per_minute=10000  of prompts and answers together
    NAME KEY priority=5               none of its requests is more urgent; smaller is more urgent, and 0 is both what a
                                      request has that names none and the most urgent one of a key without this word

One key per line, followed by its words in any order; `#` begins a comment. Several keys of one NAME are one tenant.
Only digests of the keys stay in memory, and every one is compared, so that response times reveal nothing about them.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import structlog

from tandem.errors import PermissionDenied, SettingsError, Unauthenticated
from tandem.grpc_errors import Metadata

log = structlog.get_logger(__name__)

MIN_KEY_CHARACTERS = 16  # characters
RECHECK_S = 1.0
MAX_LOOK_S = 0.05  # that a request waits while the file is looked at
LOOKING = ThreadPoolExecutor(1, "keys")  # the thread that hangs with the file system
NAME_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,64}")
NUMBER_PATTERN = re.compile(r"-?[0-9]{1,12}")
MIN_LIMITS = {"requests": 1, "tokens_per_minute": 1, "priority": -1000}  # of the words after a key
RIGHTS = ("admin", "metrics")
ADMIN_SERVICE = "/tandem.v1.AdminService/"


@dataclass(frozen=True)
class Limits:
    """The limits of a tenant at one router. None: no limit."""

    requests: int | None = None
    tokens_per_minute: int | None = None
    priority: int | None = None


@dataclass(frozen=True)
class ApiKey:
    name: str  # of the tenant
    digest: bytes = field(default=b"", repr=False)
    admin: bool = False
    metrics: bool = False
    limits: Limits = Limits()


ANONYMOUS = ApiKey("")  # the key of every client if no keys are required


class ApiKeys:
    """Raises SettingsError when the file cannot be read or is invalid."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version = _version(path)
        self._keys = _read(path)
        self._looked = monotonic()
        self._looking: Future[None] | None = None

    def check(self, authorization: str | None, *, admin: bool = False, metrics: bool = False) -> ApiKey:
        """The key that sends `authorization: Bearer KEY`. Raises Unauthenticated, PermissionDenied."""
        self._look()
        scheme, _, secret = (authorization or "").partition(" ")
        digest = _digest(secret.strip())
        matches = [key for key in self._keys if hmac.compare_digest(key.digest, digest)]
        if scheme.lower() != "bearer" or not matches:
            raise Unauthenticated(
                "this cluster requires a key; the call had none or an unknown one. Send `authorization: Bearer KEY`",
                field="authorization",
                bound="a key of the cluster's api_keys file",
            )
        if admin and not matches[0].admin:
            raise PermissionDenied(f"the key of {matches[0].name} may generate, but not inspect or change the cluster")
        if metrics and not (matches[0].metrics or matches[0].admin):
            raise PermissionDenied(f"the key of {matches[0].name} may not read metrics, which are of all tenants")
        return matches[0]

    def guard(self, method: str, shown: Metadata) -> None:
        """Checks the key of a gRPC call. Raises as `check`."""
        authorization = shown.get("authorization")
        self.check(authorization if isinstance(authorization, str) else None, admin=method.startswith(ADMIN_SERVICE))

    def named(self, name: str) -> ApiKey:
        """The tenant of that name, with the strictest limit of each kind among its keys. Raises PermissionDenied when
        it has no key."""
        self._look()
        limits = [key.limits for key in self._keys if key.name == name]
        if not limits:
            raise PermissionDenied(f"{name} has no key any more")

        def bounds(name: str) -> list[int]:
            return [value for key_limits in limits if (value := getattr(key_limits, name)) is not None]

        return ApiKey(
            name,
            limits=Limits(
                requests=min(bounds("requests"), default=None),
                tokens_per_minute=min(bounds("tokens_per_minute"), default=None),
                priority=max(bounds("priority"), default=None),
            ),
        )

    def _look(self) -> None:
        """Reads the file again if it has changed. The file system may hang; the known keys count meanwhile."""
        if monotonic() - self._looked < RECHECK_S or (self._looking and not self._looking.done()):
            return
        self._looked = monotonic()
        self._looking = LOOKING.submit(self._read_again)
        wait({self._looking}, MAX_LOOK_S)

    def _read_again(self) -> None:
        """On a thread. An invalid file changes nothing."""
        try:
            version = _version(self._path)
            if version == self._version:
                return
            self._keys, self._version = _read(self._path), version
            log.info("keys.read", file=str(self._path), keys=len(self._keys))
        except SettingsError as error:
            log.error("keys.not_read", error=error.message)


def _version(path: Path) -> tuple[int, int, int]:
    try:
        stat = os.stat(path)
    except OSError as error:
        raise _bad(path, f"cannot be read: {error.strerror}") from error
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _read(path: Path) -> list[ApiKey]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise _bad(path, f"cannot be read: {error}") from error
    keys: list[ApiKey] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) < 2 or not NAME_PATTERN.fullmatch(words[0]):
            raise _bad(path, f"has a line {number} that does not begin with NAME KEY")
        if len(words[1]) < MIN_KEY_CHARACTERS:
            raise _bad(path, f"has a key of under {MIN_KEY_CHARACTERS} characters in line {number}")
        keys.append(_key(path, number, words))
    if not keys:
        raise _bad(path, "holds no key")
    if len({key.digest for key in keys}) < len(keys):
        raise _bad(path, "holds a key twice")
    return keys


def _key(path: Path, number: int, words: list[str]) -> ApiKey:
    name, key, *about = words
    rights: set[str] = set()
    limits = {}
    for word in about:
        name_of_limit, _, value = word.partition("=")
        if word in RIGHTS and word not in rights:
            rights.add(word)
        elif (
            name_of_limit in MIN_LIMITS
            and name_of_limit not in limits
            and NUMBER_PATTERN.fullmatch(value)
            and int(value) >= MIN_LIMITS[name_of_limit]
        ):
            limits[name_of_limit] = int(value)
        else:
            raise _bad(path, f"has an unknown or repeated word {word!r:.80} in line {number}")
    return ApiKey(name, _digest(key), "admin" in rights, "metrics" in rights, Limits(**limits))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _bad(path: Path, problem: str) -> SettingsError:
    words = "admin, metrics, requests=N, tokens_per_minute=N, priority=N"
    return SettingsError(f"{path} {problem}", field="api_keys", bound=f"lines of NAME KEY, followed by any of {words}")
