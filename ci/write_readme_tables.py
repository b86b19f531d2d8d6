"""Write the setting tables of README.md from the code: `python ci/write_readme_tables.py` (`--check` only compares)."""

import sys
from pathlib import Path

from pydantic import BaseModel

from vllm_tiered_offload.settings import settings_table
from vllm_tiered_offload.tiers.fs.settings import FsTierSettings

README = Path(__file__).resolve().parents[1] / "README.md"


def table(rows: list[tuple[str, str, str]]) -> str:
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for key, default, meaning in rows:
        lines.append(f"| `{key}` | {default if default == 'required' else f'`{default}`'} | {meaning} |")
    return "\n".join(lines)


def block_rows(model: type[BaseModel]) -> list[tuple[str, str, str]]:
    """(key, default, description) of one tier's own block."""
    return [
        (name, "required" if field.is_required() else str(field.default).lower(), field.description or "")
        for name, field in model.model_fields.items()
    ]


def between(text: str, name: str, content: str) -> str:
    head, begin, rest = text.partition(f"<!-- {name}:begin -->\n")
    _, end, tail = rest.partition(f"<!-- {name}:end -->")
    assert begin
    assert end
    return f"{head}{begin}{content}\n{end}{tail}"


def written(text: str) -> str:
    """README's text with its tables as the code has them now."""
    text = between(text, "settings", table(settings_table()))
    return between(text, "fs", table(block_rows(FsTierSettings)))


if __name__ == "__main__":
    now = README.read_text()
    if "--check" in sys.argv[1:]:
        sys.exit(0 if written(now) == now else "README.md's setting tables are old: python ci/write_readme_tables.py")
    README.write_text(written(now))
