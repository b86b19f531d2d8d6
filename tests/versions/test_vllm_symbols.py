"""The tripwire: what we use of vLLM is, in the installed version, what is recorded of it."""

import importlib.util
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from vllm_symbols import HERE, PACKAGE, Source, check, differences, misfits, our_use, recorded, symbols

RECORDS = sorted(HERE.glob("vllm-*.txt"))
HOW = "where the change is meant and its uses were looked at: bash ci/matrix.sh --record"


def installed() -> Source:
    """Found, not imported."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Source(Path(spec.origin).parents[1])


def test_installed_version_is_as_recorded() -> None:
    """Failed when an attribute that no record has was read from a KVCacheConfig in connector/views.py, and when a
    hook in connector.py got one parameter more than vLLM passes."""
    problems = check(installed())
    assert not problems, "\n".join([*problems, HOW])


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.stem)
def test_every_record_has_every_import(record: Path) -> None:
    """An import that only the installed version was asked for is noticed before the matrix runs."""
    use, known = our_use(), recorded(record)
    asked = {f"{module}.{name}" for module, name in use.imports}
    assert asked <= known.keys(), f"{sorted(asked - known.keys())} are not recorded; {HOW}"
    needed = {f"{module}.{name}" for module, name in use.imports - use.guarded}
    assert not [name for name in needed if known[name] == "missing"]


# Below: the tripwire itself, on a package that uses a vLLM of a few lines.

OURS = """
from vllm.base import Base, Kind
try:
    from vllm.base import New
except ImportError:
    New = None

class Connector(Base):
    def hook(self, request, blocks):
        return request.tokens, Kind.FIRST
"""

THEIRS = """
import enum
from .hidden import Deep

class Kind(enum.Enum):
    FIRST = "first"
    SECOND = "second"

class Base(Deep):
    def hook(self, request: "Request", blocks: list[int]) -> None: ...
"""

HIDDEN = """
class Deep:
    def __init__(self, config):
        self.tokens: list[int] = []
        self.unused = 1

    @property
    def other_hook(self) -> bool: ...
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    room = tmp_path / "ours" / "connector"
    room.mkdir(parents=True)
    (room / "plugin.py").write_text(OURS)
    return room.parent


MakeSource = Callable[..., Source]


@pytest.fixture
def make(tmp_path: Path) -> MakeSource:
    def make(base: str = THEIRS, hidden: str = HIDDEN, wheel: bool = False) -> Source:
        files = {"vllm/__init__.py": "", "vllm/base.py": base, "vllm/hidden.py": hidden}
        files["vllm-1.2.3+cpu.dist-info/METADATA"] = ""
        place = tmp_path / "vllm.whl" if wheel else tmp_path / "site"
        if wheel:
            with zipfile.ZipFile(place, "w") as archive:
                for name, text in files.items():
                    archive.writestr(name, text)
        for name, text in {} if wheel else files.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(text)
        return Source(place)

    return make


@pytest.mark.parametrize("wheel", [False, True], ids=["directory", "wheel"])
def test_lists_what_is_used(package: Path, make: MakeSource, wheel: bool) -> None:
    """Inherited hooks too; of other classes the mentioned members alone."""
    source = make(wheel=wheel)
    told = {name: text for name, text in symbols(source, our_use(package)).items() if name.startswith("vllm.base")}
    assert source.version == "1.2.3"
    assert told == {
        "vllm.base.Base": "class(Deep)",
        "vllm.base.Base.__init__": "(self, config)",
        "vllm.base.Base.hook": "(self, request: Request, blocks: list[int]) -> None",
        "vllm.base.Base.other_hook": "@property (self) -> bool",
        "vllm.base.Base.tokens": "attribute: list[int]",
        "vllm.base.Base.unused": "attribute",
        "vllm.base.Kind": "class(enum.Enum)",
        "vllm.base.Kind.FIRST": "value = first",
        "vllm.base.New": "missing",
    }


@pytest.mark.parametrize(
    ("module", "old", "new", "name"),
    [
        ("base", "blocks: list[int]", "blocks: tuple[int, ...]", "Base.hook"),
        ("base", 'FIRST = "first"', 'FIRST = "one"', "Kind.FIRST"),
        ("base", 'FIRST = "first"', "", "Kind.FIRST"),
        ("hidden", "other_hook", "new_hook", "Base.new_hook"),
        ("hidden", "self.tokens: list[int]", "self.tokens: tuple[int, ...]", "Base.tokens"),
        ("base", "class Kind", "class Sort", "Kind"),
    ],
    ids=["parameter", "value", "member gone", "new hook", "inherited attribute", "class gone"],
)
def test_a_change_is_named(package: Path, make: MakeSource, module: str, old: str, new: str, name: str) -> None:
    use, texts = our_use(package), {"base": THEIRS, "hidden": HIDDEN}
    was = symbols(make(), use)
    texts[module] = texts[module].replace(old, new)
    told = differences(was, symbols(make(**texts), use))
    assert f"vllm.base.{name}" in [line.split("\n")[0] for line in told]
    assert all("\n    was  " in line and "\n    is   " in line for line in told)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("blocks: list[int]", "blocks: list[int], more: int", "['self', 'request', 'blocks', 'more']"),
        ("request: ", "req: ", "this version passes ['self', 'req', 'blocks']"),
        (", blocks: list[int]", "", "this version passes ['self', 'request']"),
        ("class Kind", "class Sort", "vllm.base.Kind is imported, and this version has none"),
    ],
    ids=["one more", "another name", "one less", "import"],
)
def test_what_cannot_work_is_said(package: Path, make: MakeSource, old: str, new: str, problem: str) -> None:
    """An import that we do without (`New`) is no problem."""
    use = our_use(package)
    assert misfits(make(), use) == []
    assert problem in misfits(make(base=THEIRS.replace(old, new)), use)[0]


def test_our_rooms_are_found() -> None:
    """Of this package: the tripwire does not pass because it looks at nothing."""
    use = our_use(PACKAGE)
    assert ("vllm.v1.request", "Request") in use.imports
    assert ("vllm.v1.core.sched.scheduler", "Scheduler") in use.imports
    assert {"block_hashes", "num_computed_tokens"} <= use.words
    assert "TieredOffloadConnector" in [ours.name for ours, _ in use.classes]


def test_records_are_of_the_versions_that_the_extras_allow() -> None:
    """Neither a version that is promised and was never looked at, nor one that was dropped and is still recorded."""
    extras = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (cuda,) = map(Requirement, extras["cuda"])
    minors = [f"0.{minor}" for minor in range(20, 60)]
    assert [record.stem for record in RECORDS] == [
        f"vllm-{minor}" for minor in minors if f"{minor}.0" in cuda.specifier
    ]
