"""The table, the page, the CSV and the pictures of a comparison, read back."""

import csv
from dataclasses import replace
from io import StringIO
from pathlib import Path

from PIL import Image
from rich.console import Console

from headroom.comparison.page import (
    MOST_ROWS,
    compare_groups,
    make_markdown,
    make_terminal_table,
    write_page,
)
from headroom.comparison.page import _draw_memory as pictures_of_memory
from headroom.comparison.run_groups import Points, group_runs
from tests.comparison.runs import run

PHASES = {"data_wait": 5.0, "forward": 20.0, "backward": 40.0, "optimizer": 10.0}


def test_it_is_all_there_and_nothing_acts_as_markup(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>[bold]|"
    runs = [
        run("a" * 32, speed=1000, phases=PHASES, memory={"parameters": 1.0}, data__path=evil),
        run("b" * 32, speed=400, phases=PHASES, memory={"parameters": 2.0}, data__path="plain"),
        run("c" * 32, status="FAILED", data__path="gone"),
    ]
    comparison = compare_groups(group_runs(runs), title=f"comparison of {evil}")
    series: dict[str, Points] = {"a" * 32: [(at, at * 10, 1.0 / at) for at in range(1, 50)]}
    files = write_page(comparison, tmp_path, series=series)
    assert [file.name for file in files] == [
        "comparison.html",
        "comparison.csv",
        *("speed.png", "loss.png", "time.png", "memory.png"),
    ]
    page = files[0].read_text()
    assert "<script" not in page and "http" not in page.replace("http-equiv", "")
    assert page.count("data:image/png;base64") == 4
    assert "FAILED: memory ran out" in page and "2.50x" in page and "is 2.50x slower" in page
    for file in files[2:]:
        with Image.open(file) as picture:
            colours = picture.convert("RGB").getcolors(2**24) or []
            assert picture.width == 1200 and len(colours) > 20, "an empty picture"
    rows = list(csv.DictReader(files[1].read_text().splitlines()))
    assert [row["status"] for row in rows] == ["FINISHED", "FINISHED", "FAILED"]
    assert rows[1]["speed/samples_per_s"] == "400" and rows[2]["speed/samples_per_s"] == ""
    assert rows[0]["data.path"].startswith("<script>")
    console = Console(width=200, record=True, file=StringIO())
    console.print(make_terminal_table(comparison, width=200))
    assert "[bold]" in console.export_text(clear=False)
    assert len(make_markdown(comparison).splitlines()) > 5


def test_a_narrow_terminal_loses_columns_and_no_row() -> None:
    groups = group_runs(
        [run(f"{n:032}", speed=100 + n, phases=PHASES, optim__lr=n) for n in range(3)]
    )
    comparison = compare_groups(groups, title="x")
    for width in (30, 60, 100):
        console = Console(width=width, record=True, file=StringIO())
        console.print(make_terminal_table(comparison, width=width))
        assert len(console.export_text().splitlines()) == 4
    assert list(comparison.columns)[:3] == ["lr", "run", "samples/s"]


def test_of_many_the_terminal_shows_the_first(tmp_path: Path) -> None:
    groups = group_runs([run(f"{n:032}", optim__lr=n) for n in range(MOST_ROWS + 5)])
    comparison = compare_groups(groups, title="many")
    table = make_terminal_table(comparison, width=120)
    assert table.row_count == MOST_ROWS and table.caption == "and 5 more, on the page"
    page = write_page(comparison, tmp_path, series={})[0].read_text()
    assert page.count("<tr") >= MOST_ROWS + 5


def test_the_memory_of_the_device_is_a_line_where_it_is_near(tmp_path: Path) -> None:
    drawn = {}
    for total in ("120", "24106"):
        runs = [run(f"{n:032}", memory={"activations": 50.0 * n}, optim__lr=n) for n in (1, 2)]
        runs = [replace(r, tags={**r.tags, "device.total_mib": total}) for r in runs]
        figure = pictures_of_memory(group_runs(runs))
        assert figure is not None
        drawn[total] = figure.axes[0]
        assert figure.axes[0].get_title(loc="right") == f"the device has {float(total):,.0f}"
    assert len(drawn["120"].lines) == 1 and not drawn["24106"].lines
    assert drawn["24106"].get_xlim()[1] < 200, "the bars stay large"
