"""The import rules of the package as data, and the check that applies them to a syntax tree."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "vllm_tiered_offload"
ROOT = "root"
"""The package's own __init__: what tier authors import. Rooms name the module that they mean instead."""

FIRST_COLUMN = ["connector", "scheduler", "hierarchy", "tiers", "region", "contract"]
SECOND_COLUMN = ["worker", "region", "contract"]
BESIDE_THE_FIRST_COLUMN = {"settings", "telemetry"}
IMPORT_ANYTHING = {"cli", "testing"}

MAY_IMPORT: dict[str, set[str]] = {
    **{room: set(FIRST_COLUMN[i + 1 :]) | BESIDE_THE_FIRST_COLUMN for i, room in enumerate(FIRST_COLUMN[:-2])},
    "worker": set(SECOND_COLUMN[1:]),
    "region": {"contract"},
    "contract": set(),
    "settings": {"contract"},
    "telemetry": {"contract"},
    ROOT: {"contract", "settings"},
}
MAY_IMPORT["connector"] |= set(SECOND_COLUMN)

# Third-party packages that only some places may import, by module prefix.
ONLY_IN = {
    "vllm": ("connector", "testing.simulator"),
    "torch": ("worker", "connector", "testing"),
}
NOWHERE = ["vllm.v1.kv_offload"]

# Places that may import these third-party packages and no others.
ONLY_THESE: dict[str, set[str]] = {
    "contract": set(),
    "region": {"numpy"},
    "worker": {"torch", "numpy", "numba", "llvmlite", "triton"},  # the last three where they are there
}


def violations(module: str, source: str, is_package: bool = False) -> list[str]:
    """What `source`, being the module `module` of the package, imports against the rules."""
    place = module.removeprefix(PACKAGE).removeprefix(".")
    room = place.split(".")[0] or ROOT
    found = []
    for line, target in imports(ast.parse(source), module, is_package):
        if reason := broken_rule(room, place, target):
            found.append(f"{module}:{line} imports {target}: {reason}")
    return found


def broken_rule(room: str, place: str, target: str) -> str | None:
    for banned in NOWHERE:
        if within(target, banned):
            return f"{banned} is imported nowhere, it changes with every release"
    if within(target, PACKAGE):
        return broken_arrow(room, target.removeprefix(PACKAGE).removeprefix(".").split(".")[0] or ROOT)
    package = target.split(".")[0]
    if package in ONLY_IN and not any(within(place, allowed) for allowed in ONLY_IN[package]):
        return f"{package} is imported in {', '.join(ONLY_IN[package])} only"
    if room in ONLY_THESE and package not in sys.stdlib_module_names | ONLY_THESE[room]:
        return f"{room}/ imports {', '.join(sorted(ONLY_THESE[room])) or 'nothing'} beside the standard library"
    return None


def broken_arrow(room: str, target: str) -> str | None:
    if target == room or room in IMPORT_ANYTHING:
        return None
    if target in MAY_IMPORT.get(room, set()):
        return None
    if room not in MAY_IMPORT:
        return f"the room {room} has no place in the import rules"
    return f"{room} imports {', '.join(sorted(MAY_IMPORT[room])) or 'no other room'} only"


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything imported, at any depth, for types too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node, module, is_package)
            # `from package import room` names the room; `from package.room import name` needs no more than the room.
            yield from ((node.lineno, f"{base}.{alias.name}" if base in PARENTS else base) for alias in node.names)
        elif isinstance(node, ast.Call) and (name := imported_by_call(node)):
            yield node.lineno, name


PARENTS = {PACKAGE, "vllm", "vllm.v1"}
"""Packages out of which a rule picks single children."""


def absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parents = module.split(".")
    parents = parents[: len(parents) - node.level + is_package]
    return ".".join([*parents, *([node.module] if node.module else [])])


def imported_by_call(node: ast.Call) -> str | None:
    """The name in importlib.import_module("name") or __import__("name")."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
        return str(node.args[0].value)
    return None


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def modules_of(directory: Path) -> Iterator[tuple[str, Path]]:
    """(dotted name, file) of every module of the package that lies in `directory`."""
    for file in sorted(directory.rglob("*.py")):
        parts = file.relative_to(directory).with_suffix("").parts
        yield ".".join([PACKAGE, *parts]).removesuffix(".__init__"), file
