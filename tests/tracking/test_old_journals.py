"""Which journals are swept."""

from pathlib import Path

from headroom.tracking.mlflow_store import remove_old_journals
from tests.run_folders import write_end, write_start


def sweep(runs: Path, *, keep: int) -> None:
    """What a sending process does at the end of its run."""
    remove_old_journals(runs, keep=keep)


def test_the_oldest_journals_are_swept_by_when_they_were_made(tmp_path: Path) -> None:
    """By their names, those of another time zone went first."""
    for name, made_at in (("9-first", 1.0), ("1-last", 3.0), ("5-second", 2.0)):
        folder = tmp_path / name
        folder.mkdir()
        write_start(folder, "a", made_at=made_at)
        write_end(folder, {"status": "FINISHED"}, is_sent=True)
    again = tmp_path / "0-again"
    again.mkdir()
    write_start(again, "a", made_at=0.5, resumed_at=4.0)
    write_end(again, {"status": "FINISHED"}, is_sent=True)
    sweep(tmp_path, keep=2)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["0-again", "1-last"]
