"""The page of a step's memory stands alone, and says what the ledger counted."""

import re
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

from headroom.base.names import OWNERS
from headroom.report.memory_timeline import (
    COLOURS,
    COLUMNS,
    SHOWN,
    draw_timeline,
    make_timeline_page,
    sum_bytes,
    thin_out_points,
)
from headroom.watch.allocation_log import AllocationLog

CPU = torch.device("cpu")
MIB = 2**20
ROUNDED = MIB // 200  # 0.02 MiB
UNITS = {"B": 1, "KiB": 2**10, "MiB": MIB}
VOID = {"meta", "img"}  # elements without an end


class Read(HTMLParser):
    """The elements of a page; refuses one that is not closed in its turn."""

    def __init__(self, text):
        super().__init__()
        self.open, self.found, self.words = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.found if name == tag]


def counted(limit=None, layers=3, parts=1):
    model = nn.Sequential(*[m for _ in range(layers) for m in (nn.Linear(32, 32), nn.ReLU())])
    ledger = AllocationLog(CPU, limit_bytes=limit)
    ledger.own("parameters", model.parameters())
    x = torch.zeros(64, 32)
    ledger.own("batch", [x])
    ledger.begin_step()
    with ledger.count_allocations():
        for part in x.split(64 // parts):
            loss = model(part).square().sum()
            ledger.end_phase("forward")
            loss.backward()
            ledger.end_phase("backward")
    ledger.own("gradients", [p.grad for p in model.parameters()])
    return ledger


def test_the_page_needs_no_network_and_no_script():
    read = Read(make_timeline_page(counted(), title="a step"))
    assert not {tag for tag, _ in read.found} & {"script", "link", "iframe", "object"}
    assert [img["src"][:22] for img in read.all("img")] == ["data:image/png;base64,"]
    for _, attributes in read.found:
        for name, value in attributes.items():
            assert not name.startswith("on")
            assert "http:" not in value and "https:" not in value and "url(" not in value, name
    (policy,) = [m["content"] for m in read.all("meta") if "http-equiv" in m]
    assert policy.startswith("default-src 'none'")


def test_the_sizes_on_the_page_are_the_ledgers():
    ledger = counted(limit=MIB)
    words = " ".join(Read(make_timeline_page(ledger, title="a step")).words)
    approx_peak = pytest.approx(ledger.step_peak_bytes, rel=0.01, abs=ROUNDED)
    for owner, size in ledger.sum_owners_at_peak().items():
        assert pytest.approx(size, rel=0.01, abs=ROUNDED) in read_sizes(words, owner, "")
    assert read_sizes(words, "", " at the peak") == [approx_peak]
    assert "limit 1.00 MiB" in words
    shown = " ".join(text.get_text().strip() for text in picture_of(ledger).texts)
    assert read_sizes(shown, "peak", "") == [approx_peak]


def read_sizes(words, before, after):
    """The sizes in bytes that stand between these two texts."""
    found = re.findall(rf"{before}\s*([\d.]+) (B|KiB|MiB){after}", words)
    return [float(number) * UNITS[unit] for number, unit in found]


def picture_of(ledger):
    return draw_timeline(ledger.compute_timeline(), ledger)


def gids(axes):
    return [line.get_gid() for line in axes.lines]


def test_the_areas_add_up_to_what_was_held():
    ledger = counted()
    axes = picture_of(ledger)
    names = [area.get_label() for area in axes.collections]
    assert names == [owner for owner in OWNERS if owner in names]
    (peak,) = (line for line in axes.lines if line.get_gid() == "peak")
    ((at, most),) = peak.get_xydata()
    assert most == ledger.step_peak_bytes
    corners = axes.collections[-1].get_paths()[0].vertices
    assert corners[:, 1].max() == most and at in corners[corners[:, 1] == most, 0]


def test_the_phases_are_named_where_they_are_and_a_limit_in_sight_is_a_line():
    ledger = counted(parts=2)
    near = counted(limit=int(1.1 * counted().step_peak_bytes))
    axes = picture_of(ledger)
    assert gids(axes).count("phase") == 4 and "limit" not in gids(axes)
    assert {"forward", "backward"} <= {text.get_text() for text in axes.texts}
    assert "limit" in gids(picture_of(near))
    far = counted(limit=100 * MIB)
    assert "limit" not in gids(picture_of(far)) and "limit 100 MiB" in make_timeline_page(
        far, title="a step"
    )


def test_every_owner_has_a_colour_of_its_own():
    assert set(OWNERS) == set(COLOURS)
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_what_is_alike_is_one_row_and_the_rest_is_summed_up():
    ledger = AllocationLog(CPU)
    with ledger.count_allocations():
        alike = [torch.zeros(MIB // 4) for _ in range(5)]
        others = [torch.zeros(10 + n) for n in range(SHOWN + 6)]
    assert sum(t.nbytes for t in alike) == 5 * MIB
    read = Read(make_timeline_page(ledger, title="a step"))
    words = [word for word in read.words if word.strip()]
    at = words.index("made by, each")
    row = words[at + 3 : at + 7]
    assert row == [
        "rest",
        "5.00 MiB",
        "5",
        "zeros (262144,) float32",
    ]
    left = sorted(tensor.nbytes for tensor in others)[:7]
    assert f"and 7 more, {sum(left)} B" in words


def test_thousands_of_allocations_are_thinned_and_keep_their_peak():
    ledger = AllocationLog(CPU)
    with ledger.count_allocations():
        ledger.begin_step()
        for n in range(6000):
            kept = torch.zeros(10_000 if n == 4321 else 1 + n % 97)
            if n % 1500 == 0:
                ledger.end_phase(f"phase {n}")
    assert len(make_timeline_page(ledger, title="a step")) < 200_000
    assert kept.numel() < 97
    points = ledger.compute_timeline()
    shown = thin_out_points(points)
    assert len(shown) <= COLUMNS + 2 and shown[0] == points[0] and shown[-1] == points[-1]
    assert max(map(sum_bytes, shown)) == max(map(sum_bytes, points))


@pytest.mark.parametrize("title", ["<script>alert(1)</script>", 'a "b" & <c>'])
def test_nothing_it_is_given_acts_as_markup(title):
    ledger = counted()
    for entry in ledger.list_at_peak():
        entry.line = entry.what = title
    ledger.own(title, [torch.zeros(9)])
    text = make_timeline_page(ledger, title=title, lines=[title])
    assert not {tag for tag, _ in Read(text).found} & {"script", "c"}
    assert title not in text


def test_a_ledger_that_counted_nothing_has_a_page_too():
    assert "0 MiB at the peak" in make_timeline_page(AllocationLog(CPU), title="nothing")
