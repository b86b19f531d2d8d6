"""Running the command in this process."""

import json
from typing import Any, NamedTuple

import pytest

from vllm_tiered_offload.cli.main import main


class Outcome(NamedTuple):
    """What the command said, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Command:
    """`Command(capsys, "fs")("ls", root)` runs `vllm-tiered-offload fs ls root`."""

    def __init__(self, capsys: pytest.CaptureFixture[str], group: str) -> None:
        self._capsys = capsys
        self._group = group

    def __call__(self, *arguments: object) -> Outcome:
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main([self._group, *map(str, arguments)])
        out, err = self._capsys.readouterr()
        code = end.value.code or 0
        assert isinstance(code, int)
        return Outcome(code, out, err)
