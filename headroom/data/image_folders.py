"""Lists a folder of images as its user has it: a folder for each class, with the images in it. Only
names are read here, no pixel. It refuses, all at once and by name, what would be learnt wrongly or
not at all: loose files, folders in folders, classes of fewer than two images, links that lead
elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headroom.data.source_data import (
    MOST_SHOWN,
    DataError,
    format_list,
    make_missing_error,
    refuse_target,
    shorten,
)
from headroom.settings.run_config import DataConfig

IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
CLUTTER_NAMES = ("thumbs.db", "ehthumbs.db", "desktop.ini", "__macosx")
CLUTTER_ENDINGS = (".txt", ".md")  # a licence or a readme beside the images


@dataclass(frozen=True)
class ImageFolder:
    """The images in the order of their rows: by class, then by name."""

    path: Path
    classes: tuple[str, ...]
    files: tuple[tuple[str, str], ...]  # class and name
    skipped: int  # clutter: hidden files and what systems and people leave beside images

    def paths(self) -> Iterator[Path]:
        return (self.path / kind / name for kind, name in self.files)


def scan_image_folder(data: DataConfig) -> ImageFolder:
    """List the images at data.path. Errors: DataError with a line for each of the first
    problems."""
    refuse_target(data)
    root = Path(os.path.abspath(os.path.expanduser(data.path or "")))
    there, clutter = _list_entries(root)
    problems: list[str] = []
    classes = [entry.name for entry in there if _is_class(entry, problems)]
    loose = [entry.name for entry in there if not entry.is_symlink() and not entry.is_dir()]
    if loose:
        problems.append(
            f"data.path: {root.name} has files beside its folders: {format_list(loose)}; put each "
            "image into the folder of its class, and other files elsewhere"
        )
    if not problems and len(classes) < 2:
        has = f"one class only ({format_list(classes)})" if classes else "no folders in it"
        problems.append(f"data.path: {root.name} has {has}; make a folder for each of 2 classes")
    real, files = Path(os.path.realpath(root)), []
    for kind in classes:
        names, left = _list_images(root / kind, real, problems)
        files += [(kind, name) for name in names]
        clutter += left
    if problems:
        raise make_refusal(problems)
    return ImageFolder(root, tuple(classes), tuple(files), clutter)


def _list_entries(folder: Path) -> tuple[list[os.DirEntry[str]], int]:
    """What lies in a folder, by name, and how much clutter was left out."""
    shown = shorten(str(folder), 300)
    try:
        with os.scandir(folder) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
    except FileNotFoundError:
        raise make_missing_error(folder, "folder") from None
    except NotADirectoryError:
        raise DataError(
            f"data.path: {shown} is no folder; source images needs one with a folder for each "
            "class, so name that or set data.source to what the file is"
        ) from None
    except OSError as error:
        raise DataError(
            f"data.path: {shown} cannot be read ({error.strerror}); mend that or name another "
            "folder"
        ) from None
    kept = [entry for entry in entries if not _is_clutter(entry.name)]
    return kept, len(entries) - len(kept)


def _is_clutter(name: str) -> bool:
    lower = name.lower()
    return name.startswith(".") or lower in CLUTTER_NAMES or lower.endswith(CLUTTER_ENDINGS)


def _is_class(entry: os.DirEntry[str], problems: list[str]) -> bool:
    if entry.is_symlink():
        problems.append(
            f"data.path: {shorten(entry.name)} is a link; classes are folders of their own, so "
            "replace it by the folder"
        )
        return False
    if not entry.is_dir():
        return False
    if not entry.name.isprintable():
        problems.append(
            f"data.path: folder {shorten(entry.name)} has an unprintable name; rename it"
        )
    return True


def _list_images(folder: Path, root: Path, problems: list[str]) -> tuple[list[str], int]:
    """The names of a class's images, and how much clutter lies beside them."""
    entries, clutter = _list_entries(folder)
    before = len(problems)
    for entry in entries:
        wrong = _describe_problem(entry, root)
        if wrong:
            what = shorten(f"{folder.name}/{entry.name}", 120)
            problems.append(f"data.path: {what} {wrong}")
    if len(problems) == before and len(entries) < 2:
        has = "one image only" if entries else "no images"
        problems.append(
            f"data.path: folder {shorten(folder.name)} has {has}, and a class needs at least 2 "
            "(one to learn from, one to validate); add some, or remove the folder"
        )
    return [entry.name for entry in entries], clutter


def _describe_problem(entry: os.DirEntry[str], root: Path) -> str:
    """Why this can be no image of a class; empty where it can."""
    if entry.is_symlink():
        try:
            inside = Path(os.path.realpath(entry.path, strict=True)).is_relative_to(root)
        except OSError as error:  # a loop, or a link to nowhere
            return f"is a link that leads nowhere ({error.strerror}); remove it"
        if not inside:
            return "is a link that leaves data.path; copy the file there instead"
    if entry.is_dir():
        return (
            "is a folder, and images must lie right in the folder of their class; if the folders "
            f"in {shorten(Path(entry.path).parent.name)} are the classes, set data.path to it"
        )
    if not entry.is_file():
        return "is not a regular file; remove it"
    if not entry.name.isprintable():
        return "has an unprintable name; rename it"
    if not entry.name.lower().endswith(IMAGE_ENDINGS):
        return f"is no image that can be read ({', '.join(IMAGE_ENDINGS)}); convert or remove it"
    return ""


def make_refusal(problems: Sequence[str]) -> DataError:
    """Return the error that names the first few problems, and how many more there are."""
    more = len(problems) - MOST_SHOWN
    rest = [f"data.path: and {more:,} more like these"] if more > 0 else []
    return DataError("\n".join([*problems[:MOST_SHOWN], *rest]))
