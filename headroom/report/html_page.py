"""Write the report as one HTML page that stands alone: no script, no network, the plots inside
it, for light and dark screens. Nothing it is given can act as markup: all is escaped, and the
page's own policy forbids scripts and requests.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from headroom.base.units import format_number, format_percent, make_printable
from headroom.report.report_sections import Block, Grid, Report, Section

# The plots on the page. That of the times shows the same bars once more.
ALT = {
    "loss": "Loss by step",
    "memory": "Where the memory went",
    "val_confusion": "Confusion matrix of the validation rows",
    "test_confusion": "Confusion matrix of the test rows",
}
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5b6470; --line: #d8dde3;
  --back: #ffffff; --bar: #0072b2; --good: #00704f; --bad: #b3261e; --warn: #8a5a00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #9aa4b0; --line: #363d46;
  --back: #14171b; --bar: #56b4e9; --good: #4cc38a; --bad: #ff8a80; --warn: #e6b450; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.5rem 3rem; max-width: 62rem; background: var(--back);
  color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0; line-height: 1.3; }
h2 { font-size: 1rem; margin: 2rem 0 .4rem; padding-top: .6rem; border-top: 1px solid var(--line); }
p { margin: .15rem 0; }
.status { font-weight: 700; font-size: .85rem; letter-spacing: .05em; }
.FINISHED, .good { color: var(--good); } .FAILED, .bad { color: var(--bad); }
.KILLED { color: var(--warn); } .good, .bad { font-weight: 600; }
.facts { font-size: 1.1rem; margin-top: .3rem; }
.error { margin-top: .8rem; padding: .6rem .9rem; border-left: 4px solid var(--bad); }
.verdict { margin-top: .8rem; padding: .6rem .9rem; border-left: 4px solid var(--bar); }
.blocks { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 0 3rem;
  align-items: start; }
table { border-collapse: collapse; width: 100%; margin: .7rem 0; font-size: .93rem;
  font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); }
td, th { padding: .15rem .8rem .15rem 0; vertical-align: top; text-align: left; }
th { font-weight: 500; color: var(--soft); } th + th { text-align: right; }
td.n { text-align: right; white-space: nowrap; } td.b { width: 45%; }
.bars td { overflow-wrap: normal; }
.bar { height: .55rem; margin-top: .42rem; border-radius: 2px; background: var(--bar); }
img { display: block; max-width: 100%; margin: 1rem 0; border: 1px solid var(--line);
  border-radius: 4px; }
pre { padding: .7rem .9rem; border: 1px solid var(--line); border-radius: 4px; margin: .4rem 0;
  white-space: pre-wrap; }
summary { cursor: pointer; margin-top: .8rem; color: var(--soft); }
"""


def render_html(
    report: Report, *, command: str, run: Mapping[str, Any], plot_files: Iterable[Path]
) -> str:
    """Return the page: headline, sections, pictures, and all params, tags and metrics."""
    name = escape(report.name)
    kind = report.status if report.status in ("FINISHED", "FAILED", "KILLED") else ""
    error = f'<p class="error">{escape(report.error)}</p>' if report.error else ""
    verdict = f'<p class="verdict">{escape(report.verdict)}</p>' if report.verdict else ""
    return make_document(
        name,
        STYLE,
        f'<p class="status {kind}">{escape(report.status)}</p><h1>{name}</h1>',
        f'<p class="facts">{escape(", ".join(report.headline))}</p>{error}{verdict}',
        *(_render_section(section) for section in report.sections),
        *(embed_image(ALT[f.stem], f.read_bytes()) for f in plot_files if f.stem in ALT),
        f"<h2>Open it in MLflow</h2><pre>{escape(command)}</pre>",
        "<h2>All of it</h2>",
        *(_render_details(title, run.get(key)) for title, key in _DETAILS),
    )


def make_document(title: str, style: str, *parts: str) -> str:
    """Return the whole page of these parts, all of them escaped already."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body>\n</html>\n"
    )


def embed_image(alt: str, png: bytes) -> str:
    """Return a picture that is embedded in the page."""
    data = base64.b64encode(png).decode("ascii")
    return f'<img alt="{alt}" src="data:image/png;base64,{data}">'


_DETAILS = (
    ("Asked (params)", "params"),
    ("Found (tags)", "tags"),
    ("Measured (metrics)", "metrics"),
)


def _render_section(section: Section) -> str:
    kinds = {True: ' class="good"', False: ' class="bad"', None: ""}
    lines = "".join(
        f"<p{kinds[section.ok] if i == 0 else ''}>{escape(line)}</p>"
        for i, line in enumerate(section.lines)
    )
    drawn, grids = section.split_for_pages()
    blocks = "".join(_render_block(block) for block in drawn)
    grid = f'<div class="blocks">{blocks}</div>' if blocks else ""
    tables = "".join(_render_grid(grid) for grid in grids)
    return f"<h2>{escape(section.title)}</h2>{lines}{grid}{tables}"


def _render_grid(grid: Grid) -> str:
    head = "".join(f"<th>{escape(word)}</th>" for word in grid.head)
    rows = "".join(
        f"<tr><td>{escape(name)}</td>"
        + "".join(f'<td class="n">{escape(value)}</td>' for value in values)
        + "</tr>"
        for name, *values in grid.rows
    )
    return f"<table><caption>{escape(grid.title)}</caption><tr>{head}</tr>{rows}</table>"


def _render_block(block: Block) -> str:
    rows = "".join(
        f'<tr><td>{escape(bar.label)}</td><td class="n">{escape(bar.value)}</td>'
        f'<td class="n">{"" if bar.share is None else escape(format_percent(bar.share))}</td>'
        f'<td class="b"><div class="bar" style="width:{100 * bar.length:.1f}%"></div></td></tr>'
        for bar in block.bars
    )
    return f'<table class="bars"><caption>{escape(block.title)}</caption>{rows}</table>'


def _render_details(title: str, values: Mapping[str, Any] | None) -> str:
    shown = {k: v for k, v in sorted((values or {}).items()) if v is not None}
    shown.pop("mlflow.note.content", None)  # this report again
    rows = "".join(
        f"<tr><td>{escape(make_printable(k, limit=250))}</td>"
        f"<td>{escape(_format_value(v))}</td></tr>"
        for k, v in shown.items()
    )
    opened = f"<details><summary>{escape(title)}</summary><table>{rows}</table></details>"
    return opened if rows else ""


def _format_value(value: Any) -> str:
    return format_number(value) if isinstance(value, float) else make_printable(value, limit=1000)
