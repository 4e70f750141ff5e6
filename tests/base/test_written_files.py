"""A file that was asked for is there whole, or not at all and named in a sentence."""

from pathlib import Path

import pytest

from headroom.base.written_files import write_whole


def _fill_disk(file: Path) -> None:
    """Let what is written next for that file find no room."""
    file.with_name(f".{file.stem}.part{file.suffix}").symlink_to("/dev/full")


def test_of_a_full_disk_the_file_and_the_remedy_are_told_and_the_older_one_stays(
    tmp_path: Path,
) -> None:
    """`failed: [Errno 28] No space left on device` named no file, and left half of one."""
    file = tmp_path / "comparison.html"
    file.write_text("older")
    _fill_disk(file)
    with pytest.raises(OSError) as refused, write_whole(file) as half:
        half.write_text("newer")
    assert str(refused.value) == (
        f"{file} can't be written (No space left on device); make room there"
    )
    assert [*tmp_path.iterdir()] == [file] and file.read_text() == "older"


def test_a_folder_that_cannot_be_made_is_told_too(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with (
        pytest.raises(OSError, match="/taken/a.csv can't be written .*; see to it$"),
        write_whole(tmp_path / "taken" / "a.csv") as half,
    ):
        half.write_text("never")


def test_what_fails_for_another_reason_leaves_no_half_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="^no figure$"), write_whole(tmp_path / "a.png") as half:
        half.write_text("half")
        raise ValueError("no figure")
    assert not [*tmp_path.iterdir()]
    with write_whole(tmp_path / "new" / "a.png") as half:
        half.write_text("whole")
    assert [*tmp_path.rglob("*.*")] == [tmp_path / "new" / "a.png"]
