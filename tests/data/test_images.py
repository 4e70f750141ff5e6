"""Folders of images: which pixels the rows get, and that nothing enormous or broken is decoded."""

import logging
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from headroom.data import images, prepared_cache
from headroom.data.images import MOST_PIXELS, decode_square, inspect_image
from headroom.data.preparation import check_data, load_arrays, prepare_dataset
from headroom.data.source_data import DataError, RawData
from headroom.data.sources import SOURCES
from headroom.settings.run_config import DataConfig
from tests.data.configs import make_data_config

RED, WHITE = (200, 10, 30), (255, 255, 255)


@pytest.fixture(autouse=True)
def _no_prefect_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefect, once imported, warns of each line that is logged outside a flow."""
    monkeypatch.setattr(logging.getLogger("headroom"), "handlers", [])


def _noise(width: int, height: int, seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Two classes of two noisy PNGs each."""
    for i, name in enumerate(("cat/a.png", "cat/b.png", "dog/a.png", "dog/b.png")):
        path = tmp_path / "pets" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        _noise(20, 12, seed=i).save(path)
    return tmp_path / "pets"


def _config(folder: Path, **more: Any) -> DataConfig:
    given = {"image_size": 8, "cache": str(folder.parent / "cache"), **more}
    return make_data_config(source="images", path=str(folder), **given)


def _read(config: DataConfig) -> RawData:
    check_data(config)
    read = SOURCES["images"].read(config)
    assert isinstance(read, RawData)
    return read


def _refused(folder: Path, **more: Any) -> str:
    with pytest.raises(DataError) as told:
        _read(_config(folder, **more))
    assert all(line.startswith("data.") for line in str(told.value).splitlines())
    return str(told.value)


# Which pixels


def test_rows_are_in_the_order_of_classes_and_names_whichever_thread_is_first(pets: Path) -> None:
    for i in range(30):
        Image.new("RGB", (9, 9), (i, i, i)).save(pets / "cat" / f"c{i:02}.png")
    raw = _read(_config(pets))
    assert raw.features.shape == (34, 3, 8, 8) and raw.features.dtype == np.uint8
    assert raw.features[2:32, 0, 4, 4].tolist() == list(range(30))
    assert raw.target.tolist() == ["cat"] * 32 + ["dog"] * 2


def test_pixels_are_scaled_by_the_mean_and_deviation_of_all_of_them(pets: Path) -> None:
    facts = prepare_dataset(_config(pets))
    assert (facts.input_shape, facts.class_names) == ((3, 8, 8), ("cat", "dog"))
    arrays = load_arrays(facts)
    assert abs(arrays.train_x.mean()) < 1e-5 and abs(arrays.train_x.std() - 1) < 1e-5
    (offset,), (scale,) = facts.offset, facts.scale
    raw = arrays.train_x * scale + offset
    assert raw.min() > -0.01 and 100 < raw.max() < 255.01


def test_the_square_in_the_middle_is_kept(tmp_path: Path) -> None:
    image = Image.new("RGB", (30, 10), RED)
    image.paste((0, 255, 0), (10, 0, 20, 10))
    for upright, name in (
        (image, "wide.png"),
        (image.transpose(Image.Transpose.ROTATE_90), "t.png"),
    ):
        upright.save(tmp_path / name)
        pixels = decode_square(tmp_path / name, side=10, grey=False)
        assert (pixels == np.array([0, 255, 0]).reshape(3, 1, 1)).all()


def test_resizing_is_bilinear(tmp_path: Path) -> None:
    image = _noise(12, 12)
    image.save(tmp_path / "a.png")
    wanted = image.resize((6, 6), Image.Resampling.BILINEAR)
    pixels = decode_square(tmp_path / "a.png", side=6, grey=False)
    assert (pixels == np.moveaxis(np.asarray(wanted), 2, 0)).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photo_is_turned_upright_as_its_exif_says(tmp_path: Path, orientation: int) -> None:
    upright = Image.new("RGB", (16, 16), WHITE)
    upright.paste(RED, (0, 0, 8, 4))  # no two turns of it look the same
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = upright.transpose(undo[orientation]) if orientation in undo else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / "a.png", exif=exif)
    pixels = decode_square(tmp_path / "a.png", side=16, grey=False)
    assert (np.moveaxis(pixels, 0, 2) == np.asarray(upright)).all()


@pytest.mark.parametrize(
    ("mode", "colour", "seen"),
    [
        ("RGBA", (200, 10, 30, 0), WHITE),
        ("RGBA", (200, 10, 30, 255), RED),
        ("RGBA", (0, 0, 0, 51), (204, 204, 204)),
        ("LA", (0, 51), (204, 204, 204)),
        ("L", 77, (77, 77, 77)),
        ("1", 1, WHITE),
        ("RGB", RED, RED),
        ("I;16", 77 * 256 + 5, (77, 77, 77)),
    ],
)
def test_what_is_transparent_lies_on_white(
    tmp_path: Path, mode: str, colour: Any, seen: tuple[int, ...]
) -> None:
    if mode == "I;16":
        image = Image.fromarray(np.full((8, 8), colour, np.uint16))
    else:
        image = Image.new(mode, (8, 8), colour)
    image.save(tmp_path / "a.png")
    pixels = decode_square(tmp_path / "a.png", side=8, grey=False)
    assert pixels.reshape(3, -1).T.tolist() == [list(seen)] * 64
    assert inspect_image(tmp_path / "a.png", 8).grey == (mode not in ("RGB", "RGBA"))


def test_a_palette_with_a_transparent_colour_lies_on_white(tmp_path: Path) -> None:
    image = Image.new("P", (8, 8), 1)
    image.putpalette([0, 0, 0, *RED])
    image.save(tmp_path / "a.png", transparency=1)
    assert (decode_square(tmp_path / "a.png", side=8, grey=False) == 255).all()
    image.save(tmp_path / "b.gif")
    assert decode_square(tmp_path / "b.gif", side=8, grey=False)[:, 3, 3].tolist() == list(RED)


def test_there_is_one_channel_only_where_all_are_greyscale(pets: Path) -> None:
    for path in pets.rglob("*.png"):
        Image.open(path).convert("L").save(path)
    assert _read(_config(pets)).features.shape == (4, 1, 8, 8)
    Image.new("RGB", (8, 8), RED).save(pets / "dog" / "c.png")
    assert _read(_config(pets)).features.shape == (5, 3, 8, 8)


@pytest.mark.parametrize("ending", ["png", "jpg", "JPEG", "bmp", "gif", "webp", "tif", "tiff"])
def test_every_kind_of_image_is_read_whatever_its_ending_says(pets: Path, ending: str) -> None:
    Image.new("RGB", (40, 30), RED).save(pets / "cat" / f"c.{ending}")
    Image.new("RGB", (40, 30), RED).save(pets / "cat" / "d.png", "jpeg")
    raw = _read(_config(pets))
    for row in (2, 3):
        assert np.abs(raw.features[row].astype(int) - np.array(RED).reshape(3, 1, 1)).max() < 4


def test_a_large_jpeg_is_shrunk_while_it_is_decoded(tmp_path: Path) -> None:
    ramp = np.linspace(0, 255, 2048).astype(np.uint8)
    image = Image.fromarray(np.broadcast_to(ramp[:, None, None], (2048, 2048, 3)).copy())
    image.save(tmp_path / "a.jpg", quality=95)
    image.save(tmp_path / "b.jpg", quality=95, progressive=True)
    plain, progressive = (
        inspect_image(tmp_path / name, 32).needed_bytes for name in ("a.jpg", "b.jpg")
    )
    assert plain == 256 * 256 * 16 and progressive == plain + 2048 * 2048 * 6
    wanted = np.asarray(image.resize((32, 32), Image.Resampling.BILINEAR)).astype(int)
    pixels = np.moveaxis(decode_square(tmp_path / "a.jpg", side=32, grey=False), 0, 2)
    assert np.abs(pixels - wanted).max() <= 2


# The same data twice


def test_a_changed_a_renamed_and_a_moved_image_make_other_prepared_data(pets: Path) -> None:
    first = prepare_dataset(_config(pets))
    again = prepare_dataset(_config(pets))
    assert again.reused and again.fingerprint == first.fingerprint
    found = {first.folder}
    _noise(20, 12, seed=9).save(pets / "cat" / "b.png")
    found.add(prepare_dataset(_config(pets)).folder)
    os.rename(pets / "cat" / "b.png", pets / "cat" / "c.png")
    found.add(prepare_dataset(_config(pets)).folder)
    _noise(20, 12, seed=5).save(pets / "cat" / "d.png")
    found.add(prepare_dataset(_config(pets)).folder)
    os.rename(pets / "cat" / "d.png", pets / "dog" / "d.png")
    found.add(prepare_dataset(_config(pets)).folder)
    found.add(prepare_dataset(_config(pets, image_size=12)).folder)
    assert len(found) == 6


def test_an_image_that_is_added_while_others_are_read_is_noticed(
    pets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(path: Path, *, side: int, grey: bool) -> np.ndarray:
        _noise(9, 9).save(pets / "cat" / "new.png")
        return decode_square(path, side=side, grey=grey)

    monkeypatch.setattr(images, "decode_square", slowly)
    with pytest.raises(DataError, match="^data.path: .*pets was changed while it was read"):
        prepare_dataset(_config(pets))
    assert not list((pets.parent / "cache").glob("*"))


# Memory


def test_rows_that_do_not_fit_the_memory_lie_in_a_file_without_a_name(
    pets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = _read(_config(pets)).features
    monkeypatch.setattr(images, "SLACK_BYTES", (64 << 20) - 20 * 12 * 16 - 500)
    raw = _read(_config(pets, memory_mib=64))
    assert isinstance(raw.features, images.StoredRows) and raw.features.size == inside.size
    assert (raw.features[:] == inside).all() and (raw.features[1:3] == inside[1:3]).all()
    assert raw.features[9:12].shape == (0, 3, 8, 8)
    assert sorted(path.name for path in pets.parent.iterdir()) == ["pets"]


def test_a_disk_that_is_full_is_told_by_data_cache(
    pets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(images, "SLACK_BYTES", (64 << 20) - 20 * 12 * 16 - 500)
    monkeypatch.setattr(prepared_cache.os, "pwrite", full)
    said = _refused(pets, memory_mib=64)
    assert said.startswith("data.cache: ") and "(No space left on device)" in said


def test_an_image_that_needs_more_than_the_memory_allowed_is_named(pets: Path) -> None:
    Image.new("RGB", (1800, 1800), RED).save(pets / "dog" / "big.png")
    said = _refused(pets, memory_mib=64)
    assert said.startswith(
        "data.memory_mib: 'dog/big.png' needs about 49.4 MiB to decode, but 32.0 MiB"
    )
    assert _read(_config(pets, memory_mib=128)).features.shape[0] == 5


# What is refused


def test_a_broken_image_is_named_and_all_of_them_at_once(pets: Path) -> None:
    whole = (pets / "cat" / "a.png").read_bytes()
    (pets / "cat" / "cut.png").write_bytes(whole[:-40])
    (pets / "cat" / "flip.png").write_bytes(whole[:200] + b"\0\0" + whole[202:])
    (pets / "dog" / "text.jpg").write_text("no image")
    (pets / "dog" / "none.gif").touch()
    lines = _refused(pets).splitlines()
    assert len(lines) == 4
    for line, words in zip(
        lines,
        ["'cat/cut.png' is d", "'cat/flip.png' is d", "'dog/none.gif' is", "'dog/text.jpg' is"],
        strict=True,
    ):
        assert line.startswith(f"data.path: {words}")
    assert "it is none of PNG, JPEG" in lines[3]
    for i in range(9):
        (pets / "cat" / f"x{i}.png").write_text("no image")
    assert _refused(pets).splitlines()[5] == "data.path: and 8 more like these"


def test_a_jpeg_that_ends_early_is_named(pets: Path) -> None:
    _noise(64, 64).save(pets / "cat" / "c.jpg")
    whole = (pets / "cat" / "c.jpg").read_bytes()
    (pets / "cat" / "c.jpg").write_bytes(whole[: len(whole) // 2])
    assert _refused(pets).startswith(
        "data.path: 'cat/c.jpg' is damaged or no image ('image file is"
    )


def _png(width: int, height: int, more: bytes = b"") -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    values = zlib.compress(bytes(height * (3 * width + 1) if height < 99 else 1 << 20))
    chunks = _chunk(b"IHDR", header) + more + _chunk(b"IDAT", values) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def _chunk(kind: bytes, content: bytes) -> bytes:
    crc = zlib.crc32(kind + content).to_bytes(4, "big")
    return len(content).to_bytes(4, "big") + kind + content + crc


@pytest.mark.parametrize("side", [8193, 10_000, 20_000, 2**31 - 1])
def test_a_bomb_is_refused_by_what_it_claims(pets: Path, side: int) -> None:
    (pets / "cat" / "bomb.png").write_bytes(_png(side, side))
    said = _refused(pets)
    assert said.startswith("data.path: 'cat/bomb.png' claims ") and f"{MOST_PIXELS:,}" in said


@pytest.mark.parametrize("kind", ["zTXt", "iTXt", "iCCP"])
def test_a_text_that_unpacks_to_much_is_not_unpacked(pets: Path, kind: str) -> None:
    bomb = zlib.compress(bytes(1 << 26), 9)
    text = b"k\0\1\0\0\0" if kind == "iTXt" else b"k\0\0"
    (pets / "cat" / "c.png").write_bytes(_png(8, 8, _chunk(kind.encode(), text + bomb)))
    assert "'cat/c.png' is damaged or no image ('Decompressed data too large" in _refused(pets)


def test_a_canvas_is_judged_before_it_is_laid_out(pets: Path) -> None:
    frames = [Image.new("RGB", (16, 16), (i, 2, 3)) for i in (1, 200)]
    path = pets / "cat" / "c.webp"
    frames[0].save(path, save_all=True, append_images=frames[1:])
    content = bytearray(path.read_bytes())
    assert content[12:16] == b"VP8X" and len(_read(_config(pets)).features) == 5
    content[24:30] = (9999).to_bytes(3, "little") * 2
    path.write_bytes(content)
    assert "'cat/c.webp' claims 10,000 x 10,000 pixels" in _refused(pets)


def test_a_broken_exif_turns_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(_png(8, 8, _chunk(b"eXIf", b"no TIFF at all")))
    assert (decode_square(tmp_path / "a.png", side=8, grey=False) == 0).all()


def test_other_kinds_of_images_are_refused_by_name(pets: Path) -> None:
    Image.new("F", (8, 8)).save(pets / "cat" / "float.tif")
    (pets / "dog" / "c.svg").write_text("<svg/>")
    said = _refused(pets)
    assert "'dog/c.svg' is no image that can be read (.png, .jpg," in said
    (pets / "dog" / "c.svg").unlink()
    assert "'cat/float.tif' has pixels of the kind F; save it as an 8-bit PNG" in _refused(pets)


def test_the_layout_is_judged_by_names_alone_and_told_at_once(pets: Path) -> None:
    (pets / "empty").mkdir()
    (pets / "lonely").mkdir()
    (pets / "lonely" / "a.png").write_text("no image, and not looked at")
    (pets / "loose.png").touch()
    (pets / "cat" / "more").mkdir()
    with pytest.raises(DataError) as told:
        check_data(_config(pets))
    assert [line.split("; ")[0] for line in str(told.value).splitlines()] == [
        "data.path: pets has files beside its folders: 'loose.png'",
        "data.path: 'cat/more' is a folder, and images must lie right in the folder of their class",
        "data.path: folder 'empty' has no images, and a class needs at least 2 (one to learn from, "
        "one to validate)",
        "data.path: folder 'lonely' has one image only, and a class needs at least 2 (one to learn "
        "from, one to validate)",
    ]


def test_folders_of_folders_lead_to_the_right_path(tmp_path: Path, pets: Path) -> None:
    (tmp_path / "all").mkdir()
    os.rename(pets, tmp_path / "all" / "train")
    (tmp_path / "all" / "test").mkdir()
    assert "if the folders in 'train' are the classes, set data.path to it" in _refused(
        tmp_path / "all"
    )


def test_too_few_classes_no_folder_and_a_file_are_refused(tmp_path: Path, pets: Path) -> None:
    for path in (pets / "dog").iterdir():
        path.unlink()
    (pets / "dog").rmdir()
    assert _refused(pets).startswith("data.path: pets has one class only ('cat'); make a folder")
    assert _refused(pets / "cat").startswith("data.path: cat has files beside its folders")
    (tmp_path / "nothing").mkdir()
    assert _refused(tmp_path / "nothing").startswith("data.path: nothing has no folders in it")
    assert "nowhere' does not exist; name a folder" in _refused(tmp_path / "nowhere")
    assert "a.png' is no folder; source images needs one" in _refused(pets / "cat" / "a.png")
    assert _refused(pets, target="y").startswith("data.target: has no meaning for source images")


def test_hidden_files_and_notes_are_left_out_and_counted(pets: Path) -> None:
    for name in (".DS_Store", "README.md", "cat/Thumbs.db", "cat/.a.png", "dog/licence.txt"):
        (pets / name).write_text("clutter")
    (pets / ".git").mkdir()
    raw = _read(_config(pets))
    assert len(raw.features) == 4
    assert raw.notes == ("6 hidden files and notes beside the images were left out",)


def test_links_must_stay_in_the_folder_and_lead_somewhere(tmp_path: Path, pets: Path) -> None:
    _noise(9, 9).save(tmp_path / "outside.png")
    (pets / "cat" / "c.png").symlink_to("a.png")
    assert len(_read(_config(pets)).features) == 5
    (pets / "cat" / "loop.png").symlink_to("loop.png")
    (pets / "cat" / "none.png").symlink_to("nowhere.png")
    (pets / "cat" / "out.png").symlink_to(tmp_path / "outside.png")
    (pets / "self").symlink_to(pets, target_is_directory=True)
    lines = _refused(pets).splitlines()
    assert lines[0] == (
        "data.path: 'self' is a link; classes are folders of their own, so replace it by the folder"
    )
    assert "'cat/loop.png' is a link that leads nowhere (Too many levels" in lines[1]
    assert "'cat/none.png' is a link that leads nowhere (No such file" in lines[2]
    assert "'cat/out.png' is a link that leaves data.path" in lines[3]


def test_pipes_and_unprintable_names_are_refused(pets: Path) -> None:
    os.mkfifo(pets / "cat" / "pipe.png")
    os.rename(pets / "dog" / "b.png", os.fsencode(pets / "dog") + b"/b\xff\n.png")
    os.mkdir(pets / "new\nline")
    lines = _refused(pets).splitlines()
    assert lines[0] == "data.path: folder 'new\\nline' has an unprintable name; rename it"
    assert lines[1] == "data.path: 'cat/pipe.png' is not a regular file; remove it"
    assert lines[2] == "data.path: 'dog/b\\udcff\\n.png' has an unprintable name; rename it"


def test_an_image_that_must_not_be_read_is_named(pets: Path) -> None:
    with tempfile.TemporaryDirectory() as open_to_all:  # pytest's own folders are not
        os.chmod(open_to_all, 0o755)
        here = Path(shutil.copytree(pets, Path(open_to_all) / "pets"))
        (here / "cat" / "b.png").chmod(0)
        user = os.geteuid()
        if user == 0:  # root may read everything
            os.seteuid(65534)
        try:
            said = _refused(here)
        finally:
            os.seteuid(user)
    assert said == (
        "data.path: 'cat/b.png' cannot be read (Permission denied); mend that, or remove it"
    )


def test_folders_are_judged_without_pillow(pets: Path) -> None:
    code = (
        "import sys; from headroom.data.preparation import check_data; "
        "from headroom.settings.run_config import DataConfig; "
        f"check_data(DataConfig(source='images', path={str(pets)!r})); print('PIL' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
