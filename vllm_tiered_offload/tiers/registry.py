"""One lazy registry for everything that is found by name: tiers and eviction policies.

A name is looked up among the entry points of a group and imported only when somebody asks for it, so a tier with a
heavy dependency costs nothing to those who do not use it. Built-in and third-party classes come the same way.
"""

import difflib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar, cast

from vllm_tiered_offload.contract.managers import PrimaryTier, SecondaryTierManager
from vllm_tiered_offload.tiers.cpu.policies.base import EvictionPolicy
from vllm_tiered_offload.tiers.errors import RegistryError

T = TypeVar("T")

# What an ABC is called in a message to the user.
_ROLES: dict[type, str] = {
    PrimaryTier: "a primary tier (PrimaryTier)",
    SecondaryTierManager: "a secondary tier (SecondaryTierManager)",
    EvictionPolicy: "an eviction policy (EvictionPolicy)",
}


class Registry(Generic[T]):
    """Classes of one entry point group. `kind` is the word used in messages, for example "tier"."""

    def __init__(self, group: str, kind: str) -> None:
        self.group = group
        self.kind = kind
        # Registered in this process; wins over an entry point of the same name.
        self._local: dict[str, type[T]] = {}
        # Loaded entry points, each imported once.
        self._loaded: dict[str, type[T]] = {}

    def names(self) -> list[str]:
        """Every known name, sorted; imports none of them."""
        return sorted({*self._local, *(entry.name for entry in entry_points(group=self.group))})

    def register(self, name: str, cls: type[T]) -> None:
        """Make `cls` known in this process only. Raises RegistryError when the name is registered already."""
        if name in self._local:
            raise RegistryError(f"{self.kind} {name!r} is registered already ({_qualified(self._local[name])})")
        self._local[name] = cls

    def unregister(self, name: str) -> None:
        """Forget an in-process registration; nothing happens when there is none."""
        self._local.pop(name, None)

    @contextmanager
    def registered(self, name: str, cls: type[T]) -> Iterator[None]:
        """`register` for the length of a with block (for tests)."""
        self.register(name, cls)
        try:
            yield
        finally:
            self.unregister(name)

    def load(self, name: str, base: type) -> type[T]:
        """The class called `name`, which must be a concrete subclass of `base`.

        Raises RegistryError (one line) when the name is unknown, its module cannot be imported, or the class is of
        another kind.
        """
        cls = self._local.get(name) or self._loaded.get(name)
        if cls is None:
            cls = self._loaded[name] = self._import(self._find(name))
        _check(cls, base, f"{self.kind} {name!r}")
        return cls

    def _find(self, name: str) -> EntryPoint:
        for entry in entry_points(group=self.group):
            if entry.name == name:
                return entry
        known = self.names()
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise RegistryError(f"unknown {self.kind} {name!r}{hint} (known: {', '.join(known) or 'none'})")

    def _import(self, entry: EntryPoint) -> type[T]:
        what = f"{self.kind} {entry.name!r}"
        try:
            loaded = entry.load()
        except ImportError as error:
            raise RegistryError(f"{what} cannot be imported: {error}; {_install_hint(entry)}") from error
        except AttributeError as error:
            raise RegistryError(f"{what}: {entry.value} does not exist ({error})") from error
        if not inspect.isclass(loaded):
            raise RegistryError(f"{what}: {entry.value} is not a class")
        return cast(type[T], loaded)


def _install_hint(entry: EntryPoint) -> str:
    """How to install what `entry` misses: an extra of the same name when its distribution has one."""
    dist = entry.dist
    if dist is None:
        return "is its package installed completely?"
    extras = [*entry.extras] or [e for e in (dist.metadata.get_all("Provides-Extra") or ()) if e == entry.name]
    suffix = f"[{','.join(extras)}]" if extras else ""
    return f"try: pip install '{dist.name}{suffix}'"


def _check(cls: type, base: type, what: str) -> None:
    """Raise RegistryError unless `cls` is a concrete subclass of `base`."""
    if not (inspect.isclass(cls) and issubclass(cls, base)):
        wanted = _ROLES.get(base, base.__name__)
        found = next(
            (f", but {role}" for abc, role in _ROLES.items() if inspect.isclass(cls) and issubclass(cls, abc)), ""
        )
        raise RegistryError(f"{what}: {_qualified(cls)} is not {wanted}{found}")
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        raise RegistryError(f"{what}: {_qualified(cls)} lacks {', '.join(missing)}")


def _qualified(cls: object) -> str:
    return f"{getattr(cls, '__module__', '?')}.{getattr(cls, '__qualname__', repr(cls))}"


TIERS: Registry[PrimaryTier | SecondaryTierManager] = Registry("vllm_tiered_offload.tiers", "tier")
EVICTION_POLICIES: Registry[EvictionPolicy] = Registry("vllm_tiered_offload.eviction_policies", "eviction policy")


def load_primary_tier(name: str) -> type[PrimaryTier]:
    """The primary tier called `name`. Raises RegistryError."""
    return TIERS.load(name, PrimaryTier)  # type: ignore[return-value]


def load_secondary_tier(name: str) -> type[SecondaryTierManager]:
    """The secondary tier called `name`. Raises RegistryError."""
    return TIERS.load(name, SecondaryTierManager)  # type: ignore[return-value]


def load_eviction_policy(name: str) -> type[EvictionPolicy]:
    """The eviction policy called `name`. Raises RegistryError."""
    return EVICTION_POLICIES.load(name, EvictionPolicy)
