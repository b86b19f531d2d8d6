"""What is removed with a namespace, and what is not."""

import os
from pathlib import Path

import pytest
from fs_kit import Bench, keys_of

from vllm_tiered_offload.tiers.fs.files import Files, remove_tree

pytestmark = pytest.mark.fast


def test_a_link_goes_and_what_it_points_to_stays(tmp_path: Path) -> None:
    """Mutation: looking into whatever is no plain file empties `precious`."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "letter").write_text("dear")
    bench = Bench(tmp_path / "root")
    bench.tier.reset()
    bench.store(keys_of("a", 2))
    private = Path(bench.tier.namespace_path)
    (private / "ab").symlink_to(precious)
    (private / "letter").symlink_to(precious / "letter")
    os.mkfifo(private / "pipe")
    bench.tier.shutdown()
    assert not private.exists()
    assert (precious / "letter").read_text() == "dear"


def test_trouble_with_a_file_is_raised_and_not_taken_for_a_directory(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "file").write_text("x")

    class Refuses(Files):
        def unlink(self, path: str) -> None:
            raise PermissionError(13, "Permission denied", path)

    with pytest.raises(PermissionError):
        remove_tree(Refuses(), str(tmp_path / "tree"))
    assert (tmp_path / "tree" / "file").exists()
