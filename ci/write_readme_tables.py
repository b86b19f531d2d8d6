"""Write the tables of README.md and docs/ that come from the code: `python ci/write_readme_tables.py`.

`--check` only compares.
"""

import sys
from pathlib import Path

from pydantic import BaseModel

from vllm_tiered_offload.contract.lifecycle import TRANSITIONS, Event, Phase
from vllm_tiered_offload.settings import settings_table
from vllm_tiered_offload.tiers.fs.settings import FsTierSettings
from vllm_tiered_offload.tiers.p2p.settings import P2pTierSettings, PeerAddress

ROOT = Path(__file__).resolve().parents[1]


def table(rows: list[tuple[str, str, str]]) -> str:
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for key, default, meaning in rows:
        lines.append(f"| `{key}` | {default if default == 'required' else f'`{default}`'} | {meaning} |")
    return "\n".join(lines)


def block_rows(model: type[BaseModel], prefix: str = "") -> list[tuple[str, str, str]]:
    """(key, default, description) of one tier's own block, or of a block inside of it."""
    return [
        (prefix + name, "required" if field.is_required() else shown(field.default), field.description or "")
        for name, field in model.model_fields.items()
    ]


def shown(default: object) -> str:
    return "[]" if default == () else str(default).lower()


def between(text: str, name: str, content: str) -> str:
    head, begin, rest = text.partition(f"<!-- {name}:begin -->\n")
    _, end, tail = rest.partition(f"<!-- {name}:end -->")
    assert begin
    assert end
    return f"{head}{begin}{content}\n{end}{tail}"


def lifecycle() -> str:
    """The lifecycle table; an empty cell is an event that breaks the contract."""
    lines = [f"| | {' | '.join(event.value for event in Event)} |", f"|---|{'---|' * len(Event)}"]
    for phase in Phase:
        cells = [TRANSITIONS.get((phase, event)) for event in Event]
        lines.append(f"| **{phase.value}** | {' | '.join(cell.value if cell else '' for cell in cells)} |")
    return "\n".join(lines)


# file -> marker -> what stands between its begin and its end
TABLES = {
    ROOT / "README.md": {
        "settings": table(settings_table()),
        "fs": table(block_rows(FsTierSettings)),
        "p2p": table([*block_rows(P2pTierSettings), *block_rows(PeerAddress, "peers[].")]),
    },
    ROOT / "docs" / "architecture.md": {"lifecycle": lifecycle()},
}


def main() -> int:
    for path, tables in TABLES.items():
        now = text = path.read_text()
        for name, content in tables.items():
            text = between(text, name, content)
        if "--check" not in sys.argv[1:]:
            path.write_text(text)
        elif text != now:
            print(f"{path.name} has old tables: python ci/write_readme_tables.py", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
