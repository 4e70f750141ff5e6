"""The report of a run: its faces say the same, say only what was measured, and act on nothing."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headroom.report import plots, run_report
from headroom.report.report_sections import make_report, split_training_time

COMMAND = "make ui  # then open http://127.0.0.1:5000/#/experiments/1/runs/4f1c"
EVIL = (
    "<script>alert(1)</script>|[x](javascript:alert(1)) `t` [bold red]r[/] \x1b[2J\x1b[31m\r\n"
    "# head\r\n| a | b |\u202eevil\ud800 **b** ~~s~~ <img src=x onerror=alert(1)>\0"
)
PLOTS = ["loss.png", "time.png", "memory.png"]


def _cpu() -> dict[str, Any]:
    steps = range(10, 470, 10)
    falling = [[s, 2.3 * 0.99**s, 1_790_000_000_000 + s] for s in steps]
    rising = [[s, 1 - 0.5 * 0.99**s, 1_790_000_000_000 + s] for s in steps]
    return {
        "run_id": "4f1c0a9d",
        "name": "mlp-digits-1403",
        "experiment_id": "1",
        "status": "FINISHED",
        "params": {
            "model.name": "mlp",
            "data.source": "digits",
            "data.path": None,
            "optim.name": "adamw",
            "optim.lr": 0.002,
            "train.batch_size": 64,
            "train.epochs": 20,
            "train.seed": 0,
        },
        "tags": {
            "device": "cpu",
            "device.kind": "cpu",
            "device.model": "A processor",
            "device.reason": "no GPU was found on this machine",
            "torch.version": "2.13.0+cpu",
            "precision": "fp32",
            "compiled": "no",
            "data.residency": "host",
        },
        "metrics": {
            "train/loss": 0.00812,
            "val/loss": 0.0672,
            "val/accuracy": 0.9833,
            "speed/samples_per_s": 41235.7,
            "time/detect_device_s": 0.012,
            "time/prepare_data_s": 0.084,
            "time/train_model_s": 0.93,
            "time/release_memory_s": 0.031,
            "time/total_s": 4.21,
            "time/first_step_s": 0.021,
            "time/data_wait_ms": 0.03,
            "time/forward_ms": 0.5,
            "time/backward_ms": 0.6,
            "time/optimizer_ms": 0.37,
            "time/eval_s": 0.044,
            "time/log_s": 0.0072,
            "time/unaccounted_pct": 1.7,
            "memory/parameters_mib": 0.21,
            "memory/gradients_mib": 0.21,
            "memory/optimizer_state_mib": 0.42,
            "memory/host_rss_mib": 412.3,
            "memory/host_rss_peak_mib": 431.9,
            "memory/baseline_mib": 0.0,
            "memory/released_mib": 0.84,
            "memory/leaked_mib": 0.0,
            "memory/release_ok": 1.0,
        },
        "series": {
            "train/loss": falling,
            "val/loss": falling[::5],
            "val/accuracy": rising[::5],
            "memory/host_rss_mib": [[s, 380 + s / 10, t] for s, _, t in falling],
        },
        "owners": [],
        "error": None,
    }


def _cuda() -> dict[str, Any]:
    run = _cpu()
    run["tags"] |= {
        "device": "cuda:0",
        "device.kind": "cuda",
        "device.model": "NVIDIA H200",
        "device.total_mib": "143771",
        "device.reason": "the only GPU here that works",
        "accelerator.runtime": "CUDA 13.0",
        "driver.version": "580.95.05",
        "precision": "bf16",
        "compiled": "default",
        "data.residency": "device",
        "micro_batch": "512",
    }
    run["metrics"] |= {
        "speed/mfu": 0.412,
        "time/h2d_ms": 0.12,
        "time/checkpoint_s": 2.2,
        "memory/run_peak_allocated_mib": 6246.0,
        "memory/run_peak_reserved_mib": 6544.0,
        "memory/headroom_mib": 136012.0,
        "memory/fragmentation_pct": 4.55,
        "memory/alloc_retries": 0.0,
        "memory/ooms_recovered": 2.0,
        "memory/peak_forward_mib": 4890.0,
        "memory/peak_backward_mib": 6246.0,
        "memory/peak_optimizer_mib": 2750.0,
        "memory/peak_eval_mib": 1830.0,
        "memory/activations_mib": 3640.0,
        "memory/residual_mib": 8.125,
        "gpu/utilization_pct": 93.0,
        "gpu/throttled": 1.0,
    }
    run["series"]["memory/peak_allocated_mib"] = [
        [s, 6000.0 + s, t] for s, _, t in run["series"]["train/loss"]
    ]
    return run


def _failed() -> dict[str, Any]:
    run = _cuda()
    run["status"] = "FAILED"
    run["error"] = "memory.on_leak: 12.0 MiB were not given back; see the owners"
    run["metrics"] |= {"memory/leaked_mib": 12.0, "memory/release_ok": 0.0}
    del run["metrics"]["time/total_s"]
    run["owners"] = [
        _owner("Tensor", (1024, 1024), 4, "list in module my_hooks, name 'kept'"),
        _owner("Parameter", (2048, 1024), 8, "attribute 'weight' of Linear"),
    ]
    return run


def _owner(kind: str, shape: tuple[int, ...], mib: int, held_by: str) -> dict[str, Any]:
    size = mib * 1024**2
    return {
        "kind": kind,
        "shape": shape,
        "dtype": "torch.float32",
        "bytes": size,
        "held_by": held_by,
    }


def _replayed() -> dict[str, Any]:
    """Of a run on CUDA whose steps were replayed from a graph, but for a few."""
    run = _cuda()
    run["metrics"] |= {"time/replay_ms": 1.31, "time/timed_steps": 20.0}
    run["params"]["train.epochs"] = 1
    return run


def test_three_blocks_have_room_on_a_narrow_terminal() -> None:
    """Beside two others the third was squeezed to dots, and with it all of them."""
    text = _terminal(_replayed(), width=80)
    for words in ("stages of the run", "one replayed step", "one step taken plainly", "backward"):
        assert words in text
    assert "..." not in text and "\u2026" not in text
    assert "1 epoch," in text and "1 epochs" not in text


def _empty() -> dict[str, Any]:
    return {"run_id": "abc"}


def _hostile() -> dict[str, Any]:
    run = _failed()
    run |= {"name": EVIL * 3, "error": EVIL * 50, "status": EVIL}
    run["tags"] = {name: EVIL * 20 for name in run["tags"]}
    run["params"] = {name: EVIL * 5 for name in run["params"]} | {EVIL: EVIL}
    run["owners"] = [_owner(EVIL, (1,), 1, EVIL * 100) for _ in range(500)]
    run["metrics"] |= {"val/accuracy": float("nan"), "time/total_s": float("inf"), EVIL: 1.0}
    run["metrics"]["speed/mfu"] = None
    run["series"]["train/loss"] += [[1e9, float("nan"), 0], [2e9, float("inf"), 0]]
    run["series"]["val/loss"] = [[1, 1.797e308, 0]]
    return run


RUNS = pytest.mark.parametrize("make", [_cpu, _cuda, _failed, _empty, _hostile])
Make = Callable[[], dict[str, Any]]


def _terminal(run: dict[str, Any], *, width: int = 100, **options: Any) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, **options)
    console.print(run_report.make_terminal_report(run, open_command=COMMAND))
    return file.getvalue()


def _page(run: dict[str, Any]) -> str:
    return run_report.make_html(run, [], open_command=COMMAND)


def _note(run: dict[str, Any]) -> str:
    return run_report.make_markdown(run, open_command=COMMAND)


def _words(text: str) -> str:
    """The text without what only arranges it."""
    return re.sub(r"[\s\u2501\u2578\u2588|\\]+", " ", text)


@RUNS
def test_every_face_says_what_the_sections_say(make: Make) -> None:
    run = make()
    plain, page = (
        _words(_terminal(run, width=2000)),
        run_report.make_html(run, [], open_command=COMMAND),
    )
    note = _words(run_report.make_markdown(run, open_command=COMMAND))
    for section in make_report(run, limit=20).sections:
        for block in section.blocks:
            for bar in block.bars:
                assert f"{bar.label} {bar.value}" in plain
                assert f"{bar.label} {bar.value}" in note
                assert f'<td>{bar.label}</td><td class="n">{bar.value}</td>' in page


def test_a_cpu_run_tells_what_a_person_asks() -> None:
    text = _terminal(_cpu())
    for phrase in (
        "FINISHED mlp-digits-1403  val/accuracy 0.9833  4.21 s in all  on cpu",
        "mlp on digits, adamw at lr 0.002, batch 64, 20 epochs, seed 0",
        "no GPU was found on this machine",
        "other    3.15 s 75 %",
        "one step, 1.50 ms",
        "forward    0.50 ms 33 %",
        "host process 412 MiB, its peak 432 MiB",
        "OK, 0.84 MiB given back, 0 MiB in use before the run, 0 MiB leaked",
        f"Open     {COMMAND}",
    ):
        assert phrase in text


def test_the_first_three_lines_hold_result_doubt_peak_and_release() -> None:
    """MLflow's page of a run shows no more: it showed the name, and was cut in the first title."""
    run = {**_cuda(), "warnings": ["a column repeats the target", "few rows"]}
    result, doubt, memory = run_report.make_markdown(run, open_command=COMMAND).split("\n")[:3]
    assert result.startswith("**FINISHED val/accuracy 0.9833, ") and "cuda:0" in result
    assert doubt == "Doubt: a column repeats the target (and 1 more)  "
    assert memory.startswith("peak ") and "release OK" in memory


@pytest.mark.parametrize("name", ["mlp-digits-20261122-041031", "transformer-text-20261122-041031"])
def test_no_headline_is_broken_at_80_columns(name: str) -> None:
    """One line ended in "4.30 s in", the next was "all  on cpu"."""
    lines = _terminal({**_cpu(), "name": name}, width=80).splitlines()
    facts = "val/accuracy 0.9833  4.21 s in all  on cpu"
    short = f"FINISHED {name}  {facts}"
    assert lines[:1] == [short] or lines[:2] == [f"FINISHED {name}", f"         {facts}"]


def test_of_rows_nearly_all_of_one_class_the_headline_is_the_balanced_accuracy() -> None:
    run = _cpu()
    run["metrics"] |= {"val/balanced_accuracy": 0.61, "val/largest_class_share": 0.97}
    assert "val/balanced_accuracy 0.61  4.21 s in all" in _terminal(run)


def test_the_page_shows_each_thing_once(tmp_path: Path) -> None:
    files = [tmp_path / name for name in PLOTS]
    for file in files:
        file.write_bytes(b"x")
    page = run_report.make_html(_cpu(), files, open_command=COMMAND)
    assert page.count("stages of the run") == 1 and page.count("<img") == 2


def test_a_gpu_run_tells_where_its_memory_went() -> None:
    text = _terminal(_cuda())
    for phrase in (
        "cuda:0, NVIDIA H200, 140 GiB, CUDA 13.0, driver 580.95.05",
        "bf16, compiled (default), data on the device, micro-batch 512, 93 % busy, throttled",
        "peak 6.10 GiB allocated, 6.39 GiB reserved, headroom 133 GiB, 4.55 % idle at the peak",
        "2 out-of-memory errors recovered",
        "activations 3.55 GiB 58 %",
        "backward  6.10 GiB 100 %",
        "8.12 MiB kept by libraries",
    ):
        assert phrase in text


def test_the_largest_layers_are_bars_on_a_terminal_and_a_table_by_owner_on_pages() -> None:
    block = {"parameters": 2**20, "activations": 3 * 2**20}
    layers = {f"net.blocks.{n}.{part}": dict(block) for n in range(24) for part in ("up", "down")}
    layers |= {f"net.head.{n}": {"activations": 2**18} for n in range(30)}
    owners = {"parameters": 48 * 2**20, "activations": 144 * 2**20 + 30 * 2**18, "batch": 2**20}
    told = {"owners": owners, "layers": layers, "outside": {"batch": 2**20}}
    run = {**_cuda(), "layers": told}
    text = _terminal(run, width=100)
    assert re.search(r"net.blocks.\*.up \(24\) +96.0 MiB", text)
    assert re.search(r"outside the layers +1.00 MiB", text)
    page = _note(run)
    row = next(line for line in page.splitlines() if "blocks.\\*.up (24)" in line)
    assert row.split(" | ")[1:] == ["24.0 MiB", "", "", "72.0 MiB", "", "96.0 MiB |"]
    assert "by layer" in _page(run) and "by layer" not in _page(_cuda())
    names = [line for line in text.splitlines() if "head" in line or "blocks" in line]
    assert len(names) <= 8


def test_the_path_of_a_layer_acts_on_nothing() -> None:
    held = {"activations": 2**20}
    layers = {EVIL.replace(".", ""): held, "a": held}
    run = {**_cuda(), "layers": {"owners": held, "layers": layers, "outside": {}}}
    assert "<script>" not in _page(run) + _note(run)
    assert "\x1b[2J" not in _terminal(run, width=100)


def test_a_leak_is_named_largest_first() -> None:
    text = _terminal(_failed(), width=110)
    parameter = "Parameter 2048x1024 torch.float32, 8.00 MiB, held by attribute 'weight' of Linear"
    tensor = "Tensor 1024x1024 torch.float32, 4.00 MiB, held by list in module my_hooks"
    assert "NOT ALL GIVEN BACK" in text and "Error    memory.on_leak: 12.0 MiB" in text
    assert text.index(parameter) < text.index(tensor)


def test_what_was_not_measured_has_no_line_and_is_no_zero() -> None:
    run = _cpu()
    text = _terminal(run) + run_report.make_markdown(run, open_command=COMMAND)
    for absent in ("allocated", "reserved", "headroom", "h2d", "MFU", "checkpoint", "retries"):
        assert absent not in text
    assert _terminal(_empty()) == f"abc\n\nOpen     {COMMAND}\n"
    assert make_report({}).sections == ()
    assert "%" not in _terminal({"metrics": {"time/train_model_s": 1.0}})  # of what total?


def test_a_stage_is_not_made_up_where_the_stages_exceed_the_total() -> None:
    metrics = {"time/train_model_s": 1.0, "time/total_s": 0.999}
    assert "other" not in _terminal({"metrics": metrics})


@pytest.mark.parametrize("width", [80, 100, 120])
@RUNS
def test_the_terminal_report_stays_within_its_columns(make: Make, width: int) -> None:
    lines = _terminal(make(), width=width).splitlines()
    assert max(len(line) for line in lines) <= width


@pytest.mark.parametrize(("make", "most"), [(_cpu, 30), (_cuda, 31)])
def test_the_terminal_report_is_compact(make: Make, most: int) -> None:
    assert len(_terminal(make()).splitlines()) <= most


def test_a_terminal_that_knows_only_ascii_gets_only_ascii() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=file, width=80).print(
        run_report.make_terminal_report(_cuda(), open_command=COMMAND)
    )
    file.flush()
    assert b"backward  6.10 GiB 100 % -----" in file.buffer.getvalue()  # type: ignore[attr-defined]


@RUNS
def test_without_colour_the_report_says_the_same(make: Make) -> None:
    coloured = _terminal(make(), force_terminal=True, color_system="truecolor")
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == _terminal(make())


def test_hostile_text_neither_moves_the_cursor_nor_forges_a_line() -> None:
    text = _terminal(_hostile())
    assert all(c.isprintable() or c == "\n" for c in text)
    assert "[bold red]r[/]" in text  # shown, not obeyed
    assert not [line for line in text.splitlines() if line.startswith(("#", "|"))]


@RUNS
def test_the_markdown_fits_a_tag_of_mlflow_and_opens_the_run(make: Make) -> None:
    text = run_report.make_markdown(make(), open_command=COMMAND)
    assert len(text) < 8000
    assert f"```sh\n{COMMAND}\n```" in text


@pytest.mark.parametrize("evil", ["<" * 10**6, "|" * 10**5, "&" * 10**5, "`" * 5000, "\0" * 10**6])
def test_the_markdown_stays_short_whatever_the_texts(evil: str) -> None:
    run = _hostile()
    run |= {"name": evil, "error": evil, "status": evil}
    run["tags"] = dict.fromkeys(run["tags"], evil)
    run["params"] = dict.fromkeys(run["params"], evil)
    run["owners"] = [_owner(evil, (10**30,) * 50, 1, evil)] * 50
    text = run_report.make_markdown(run, open_command=evil)
    assert len(text) < 8000
    fences = [line for line in text.splitlines() if re.fullmatch("`+(sh)?", line)]
    longest = max(len(ticks) for ticks in re.findall("`*", text.splitlines()[-2]))
    assert len(fences[-1]) > longest and fences[0] == fences[-1] + "sh"


def test_markdown_tables_keep_their_columns_and_nothing_acts_as_markup() -> None:
    text = run_report.make_markdown(_hostile(), open_command="make ui")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows and all(len(re.findall(r"(?<!\\)\|", row)) == 5 for row in rows)
    assert "<" not in text and "](" not in text.replace("\\](", "")
    assert not re.search(r"(?<!\\)`", text.split("### Open")[0])
    assert text.count("\n#") == text.count("\n### ")
    assert all(c.isprintable() or c == "\n" for c in text)


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


def test_the_page_stands_alone_and_runs_nothing(tmp_path: Path) -> None:
    run = _hostile()
    files = run_report.draw_plots(run, tmp_path)
    page = run_report.make_html(run, files, open_command=EVIL)
    page.encode("utf-8")
    parser = _Tags()
    parser.feed(page)
    tags = [tag for tag, _ in parser.seen]
    assert not {"script", "link", "iframe", "a", "object"} & set(tags)
    images = [attributes for tag, attributes in parser.seen if tag == "img"]
    assert len(images) == 2 and len(files) == 3
    assert all((a["src"] or "").startswith("data:image/png;base64,") for a in images)
    assert not [a for _, attributes in parser.seen for a in attributes if a.startswith("on")]
    assert "default-src 'none'" in page and "prefers-color-scheme: dark" in page


def test_the_page_holds_all_that_was_asked_found_and_measured() -> None:
    page = run_report.make_html(_cpu(), [], open_command=COMMAND)
    assert "<td>optim.lr</td><td>0.002</td>" in page
    assert "<td>device.reason</td><td>no GPU was found on this machine</td>" in page
    assert "<td>memory/host_rss_mib</td><td>412.3</td>" in page


def test_the_time_of_a_training_is_told_whole(tmp_path: Path) -> None:
    """Evaluation, log and checkpoint stood in a line, and nobody knew of how much."""
    told = _cpu()
    told["metrics"] |= {"time/steps_s": 0.6, "time/checkpoint_s": 0.1}
    told["metrics"]["time/setup_s"] = 0.05
    parts = split_training_time(told["metrics"])
    assert [*parts] == ["set-up", "first step", "steps", "evaluation", "log", "checkpoint", "other"]
    assert sum(parts.values()) == pytest.approx(0.93)
    (section,) = [s for s in make_report(told).sections if s.title == "Time"]
    (block,) = [block for block in section.blocks if block.title == "training, 0.93 s"]
    assert [bar.label for bar in block.bars] == [*parts]
    assert "log" not in " ".join(section.lines)
    run_report.draw_plots(told, tmp_path)
    head = (tmp_path / "time.png").read_bytes()[:24]
    assert int.from_bytes(head[16:20]) == 2160, "three panels need room"
    more = {**told["metrics"], "time/steps_s": 9.0}  # of a training that went on
    assert split_training_time(more) == {}


@pytest.mark.parametrize("make", [_cpu, _cuda])
def test_plots_are_large_enough_to_read(make: Make, tmp_path: Path) -> None:
    files = run_report.draw_plots(make(), tmp_path / "new" / "plots")
    assert [f.name for f in files] == PLOTS
    for file in files:
        head = file.read_bytes()[:24]
        assert head.startswith(b"\x89PNG")
        assert (int.from_bytes(head[16:20]), int.from_bytes(head[20:24])) == (1200, 690)


@pytest.mark.parametrize(
    ("run", "names"),
    [
        ({}, []),
        ({"series": {"train/loss": []}, "metrics": {}}, []),
        ({"series": {"train/loss": [[1, float("nan"), 0]]}}, []),
        ({"series": {"train/loss": [[1, 0.0, 0]]}}, ["loss.png"]),
        ({"series": {"val/r2": [[1, -3.0, 0], [2, 0.5, 0]]}}, ["loss.png"]),
        ({"metrics": {"time/train_model_s": 0.0, "time/total_s": 0.0}}, ["time.png"]),
        ({"metrics": {"memory/parameters_mib": 0.0}}, []),
        ({"metrics": {"memory/parameters_mib": 3.0}}, ["memory.png"]),
        ({"series": {"memory/host_rss_mib": [[5, 0.0, 0]]}}, ["memory.png"]),
        ({"metrics": {"memory/peak_eval_mib": 3.0}}, ["memory.png"]),
    ],
)
def test_only_what_has_data_is_drawn(run: dict[str, Any], names: list[str], tmp_path: Path) -> None:
    assert [f.name for f in run_report.draw_plots(run, tmp_path)] == names


def test_phases_that_come_to_more_than_the_time_are_told_as_such() -> None:
    """Of some steps that are timed, times all steps: it was left out, as if all added up."""
    run = _cpu()
    run["metrics"]["time/unaccounted_pct"] = -3.2
    told = run_report.make_markdown(run, open_command="make ui")
    assert "phases come to 3.2 % more than the time" in told and "unaccounted" not in told


def _classes(count: int, name: str = "class {}") -> dict[str, Any]:
    names = [name.format(k) for k in range(count)]
    matrix = [[9 if i == j else (i + j) % 3 for j in range(count)] for i in range(count)]
    listed = [[n, 40 + k, 0.5, 0.25, 0.01 * k] for k, n in enumerate(names[:20])]
    return {"count": count, "listed": listed, "drawn": names[:30], "matrix": matrix[:30]}


@pytest.mark.parametrize("count", [2, 12, 13, 40])
def test_a_classification_is_told_and_drawn_by_class(count: int, tmp_path: Path) -> None:
    run = _cpu() | {"classes": {"val": _classes(count), "test": _classes(2)}}
    files = run_report.draw_plots(run, tmp_path)
    assert [f.name for f in files[3:]] == ["val_confusion.png", "test_confusion.png"]
    page = run_report.make_html(run, files, open_command=COMMAND)
    told = run_report.make_markdown(run, open_command=COMMAND)
    for face in (page, told, _terminal(run)):
        assert "lowest F1 of the validation rows: class 0: 0 (40 rows)" in " ".join(face.split())
    assert "| class 1 | 41 | 0.500 | 0.250 | 0.010 |" in told
    assert '<td>class 1</td><td class="n">41</td>' in page
    assert "Confusion matrix of the validation rows" in page
    assert ("the 20 of 40 with the lowest F1" in told) == (count == 40)


def test_names_of_classes_are_no_markup_and_leave_the_report_short(tmp_path: Path) -> None:
    run = _cpu() | {"classes": {part: _classes(20, EVIL + "{}") for part in ("val", "test")}}
    files = run_report.draw_plots(run, tmp_path)
    page = run_report.make_html(run, files, open_command=COMMAND)
    assert "<script>" not in page and "<img src=x" not in page
    assert len(run_report.make_markdown(run, open_command=COMMAND)) < 8000


def test_the_epoch_whose_weights_are_logged_is_told_and_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The picture's last point is the last epoch; the number beside it must be the best one's."""
    run = _cpu()
    last_step = run["series"]["val/accuracy"][-1][0]
    run["series"]["val/accuracy"] = [[1, 0.5, 0], [2, 0.875, 0], [last_step, 0.75, 0]]
    # The run's final value, which MLflow has at the last step too.
    run["series"]["val/accuracy"].append([last_step, 0.875, 1])
    run["metrics"] |= {"val/accuracy": 0.875, "train/best_epoch": 2.0, "train/epoch": 3.0}
    text = run_report.make_markdown(run, open_command=COMMAND)
    assert "the weights are those of epoch 2 of 3: its val/loss is the lowest" in text
    marked = []
    monkeypatch.setattr(plots, "_mark_point", lambda ax, point, text: marked.append((point, text)))
    run_report.draw_plots(run, tmp_path)
    assert marked == [((2, 0.875), "0.875")]
    assert plots._read_points(run, "val/accuracy")[-1] == (last_step, 0.75)


def test_the_markdown_leads_to_the_flow_run() -> None:
    """MLflow shows an address in a tag as mere text."""
    run = _cpu()
    run["tags"]["prefect.flow_run_url"] = "http://box:4200/runs/flow-run/1>a"
    text = run_report.make_markdown(run, open_command="")
    link = "[Its flow run in Prefect](<http://box:4200/runs/flow-run/1%3Ea>)"
    assert text.endswith(link + "\n")


def test_a_report_reads_the_same_from_json() -> None:
    run = json.loads(json.dumps(_failed()))
    assert run_report.make_markdown(run, open_command=COMMAND) == (
        run_report.make_markdown(_failed(), open_command=COMMAND)
    )


def test_importing_the_report_loads_neither_rich_nor_matplotlib_and_drawing_no_pyplot() -> None:
    code = (
        "import sys, headroom.report.run_report as r\n"
        "print([m for m in ('rich', 'matplotlib', 'torch') if m in sys.modules])\n"
        "r.load_plotting()\n"
        "import tempfile, pathlib\n"
        "run = {'metrics': {'time/train_model_s': 1.0}}\n"
        "with tempfile.TemporaryDirectory() as d: r.draw_plots(run, pathlib.Path(d))\n"
        "print('matplotlib.pyplot' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.stdout.split() == ["[]", "False"], done.stdout + done.stderr


def test_a_trend_is_drawn_and_a_gate_that_was_not_passed_is_told(tmp_path: Path) -> None:
    trend = {"metric": "time/fast_step_ms", "values": [1.0, 1.0, 2.0], "median": 1.0}
    trend |= {"near": 1.1, "far": 3.0, "beyond": True}
    gate = {"gate": "slower", "gate.why": "2.00 ms; backward is 61 % of it"}
    run = {"name": "r", "status": "FINISHED", "tags": gate, "trend": [trend]}
    assert [file.name for file in run_report.draw_plots(run, tmp_path)] == ["trend.png"]
    assert run_report.draw_plots({**run, "trend": []}, tmp_path) == []
    text = run_report.make_markdown(run, open_command="")
    assert "### Gate\n\n- slower than the runs before: 2.00 ms\n- backward is 61 % of it" in text
    accept = "python -m flows.runs --accept " + 32 * "0"
    long = {**gate, "gate.why": f"{150 * 'a'}; {80 * 'b'}; {accept}"}
    assert accept in _terminal({**run, "tags": long})  # the end of it was cut off
    passed = {**run, "tags": {**gate, "gate": "ok"}}
    assert "Gate" not in run_report.make_markdown(passed, open_command="")


def test_the_energy_of_a_gpu_that_is_shared_is_told_as_that_of_all() -> None:
    run = _cuda()
    run["metrics"]["gpu/energy_j"] = 41200.0
    alone = " ".join(_terminal(run).split())
    assert "J used" in alone and "by all that share" not in alone
    run["params"] = {**run["params"], "device.share": "True"}
    assert "J used by all that share the GPU" in " ".join(_terminal(run).split())


def test_a_peak_that_is_a_lower_bound_is_told_as_one() -> None:
    run = _cpu()
    run["metrics"]["memory/run_peak_allocated_mib"] = 12.5
    assert "peak at least " not in _terminal(run)
    run["metrics"]["memory/peak_is_lower_bound"] = 1.0
    assert "peak at least " in _terminal(run)
