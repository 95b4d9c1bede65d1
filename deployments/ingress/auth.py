"""API keys and their limits, from a file that may change while the server runs. Keys are kept as hashes only."""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field, ValidationError

from actors.errors import ConfigError
from actors.settings import Settings
from deployments.ingress.error_responses import ForbiddenError

logger = logging.getLogger("outrider.http")

RELOAD_PERIOD_S = 1.0


class Tenant(Settings):
    """Who a key belongs to, and what it may use. Limits are per ingress replica; None is no limit."""

    name: str
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] = "0" * 64
    requests_per_minute: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    tokens_per_minute: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Prompt and answer together, counted when an answer ends."""
    priority: Annotated[int, Field(ge=-100, le=100)] = 100
    """The highest priority that its requests may ask for."""


class _File(Settings):
    keys: tuple[Tenant, ...]


ANYONE = Tenant(name="anyone")
"""Who everybody is where no keys are configured."""


def new_key() -> str:
    """A fresh key, to be shown once."""
    return f"or-{secrets.token_urlsafe(32)}"


def key_hash(key: str) -> str:
    """What is kept of a key. Keys are random and long, so that a plain hash cannot be reversed."""
    return hashlib.sha256(key.encode()).hexdigest()


def read_keys(path: str | Path) -> tuple[Tenant, ...]:
    """The tenants of a keys file. Raises ConfigError."""
    try:
        raw = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        tenants = _File.model_validate(raw).keys
    except OSError as error:
        raise ConfigError(f"cannot read the keys file {path}: {error.strerror}", "ingress.keys_file") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"the keys file {path} is not YAML", "ingress.keys_file") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(f"the keys file {path}: {place}: {first['msg']}", "ingress.keys_file") from error
    if len({tenant.name for tenant in tenants}) != len(tenants):
        raise ConfigError(f"the keys file {path} names a tenant twice", "ingress.keys_file")
    return tenants


class KeyRing:
    """Tells who sent a request. The file is looked at again at most once a second.

    A file that has become unreadable is logged, and the keys known before stay in force.
    """

    def __init__(self, path: str | Path | None, clock: Callable[[], float]) -> None:
        self._path = None if path is None else Path(path)
        self._clock = clock
        self._looked = clock()
        self._stamp = self._stat()
        self._tenants = () if path is None else read_keys(path)

    def identify(self, authorization: str | None) -> Tenant:
        """The tenant of an Authorization header. Raises ForbiddenError."""
        if self._path is None:
            return ANYONE
        self._refresh()
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise ForbiddenError("send an API key: Authorization: Bearer KEY")
        presented = key_hash(key.strip())
        found = None
        for tenant in self._tenants:  # all of them, whatever matches: the time taken tells nothing
            if hmac.compare_digest(presented, tenant.sha256):
                found = tenant
        if found is None:
            raise ForbiddenError("this API key is not known")
        return found

    def tenant(self, name: str) -> Tenant:
        """The tenant of a name. Raises ForbiddenError when the file does not have it any more."""
        if self._path is None:
            return ANYONE
        self._refresh()
        for tenant in self._tenants:
            if tenant.name == name:
                return tenant
        raise ForbiddenError(f"the key of {name} was taken away")

    def _refresh(self) -> None:
        if self._path is None or self._clock() - self._looked < RELOAD_PERIOD_S:
            return
        self._looked = self._clock()
        stamp = self._stat()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._tenants = read_keys(self._path)
        except ConfigError as error:
            logger.error("%s; the keys known before stay in force", error)

    def _stat(self) -> tuple[int, int, int] | None:
        try:
            told = self._path.stat() if self._path is not None else None
        except OSError:
            return None
        return None if told is None else (told.st_mtime_ns, told.st_size, told.st_ino)
