"""Preparation: the split, the labels, the scale, and a cache that is whole or not there."""

import errno
import fcntl
import json
import logging
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headroom.data import preparation, prepared_cache
from headroom.data.encoding import measure_scaling, scale_features
from headroom.data.row_parts import choose_validation_rows
from headroom.data.source_data import DataError, RawData
from headroom.data.targets import encode_target
from headroom.settings.run_config import DataConfig
from tests.data.configs import change_config, make_data_config

SYNTHETIC = DataConfig(source="synthetic", args={"rows": 60, "features": 3, "classes": 3})


@pytest.fixture(autouse=True)
def _no_prefect_handlers(monkeypatch):
    """Prefect, once imported, warns of each line that is logged outside a flow."""
    monkeypatch.setattr(logging.getLogger("headroom"), "handlers", [])


def _raw(target, features=None, **more) -> RawData:
    target = np.array(target, dtype=object if isinstance(target[0], str) else None)
    if features is None:
        features = np.arange(2.0 * len(target)).reshape(-1, 2)
    names = {"feature_names": ("a", "b"), "target_name": "y", "label": "given.csv"}
    return RawData(features=np.asarray(features), target=target, **(names | more))


def _csv(tmp_path: Path, text: str, **more) -> DataConfig:
    path = tmp_path / "given.csv"
    path.write_text(text)
    return make_data_config(source="csv", path=str(path), cache=str(tmp_path / "cache"), **more)


def _cached(tmp_path: Path, config: DataConfig = SYNTHETIC) -> DataConfig:
    return config.model_copy(update={"cache": str(tmp_path / "cache")})


# Labels


def test_text_labels_are_mapped_in_alphabetical_order_and_numbers_in_numerical_order():
    text = encode_target(_raw(["b", "a", "c", "b"]), "auto")
    assert (text.class_names, text.values.tolist()) == (("a", "b", "c"), [1, 0, 2, 1])
    numbers = encode_target(_raw([10, -1, 2, 2]), "auto")
    assert (numbers.class_names, numbers.values.tolist()) == (("-1", "2", "10"), [2, 0, 1, 1])
    assert numbers.notes == ("labels were mapped to 0..K-1 in order",)
    truths = encode_target(_raw([True, False]), "classification")
    assert (truths.class_names, truths.values.tolist()) == (("False", "True"), [1, 0])
    assert encode_target(_raw([0.0, 1.0]), "auto").class_names == ("0", "1")


def test_auto_learns_classes_from_at_most_100_whole_numbers_and_amounts_from_the_rest():
    assert encode_target(_raw(np.arange(200) % 100), "auto").task == "classification"
    assert encode_target(_raw(np.arange(200) % 101), "auto").task == "regression"
    amounts = encode_target(_raw([0.5, 1.0]), "auto")
    assert amounts.task == "regression" and amounts.values.tolist() == [[0.5], [1.0]]
    assert amounts.class_names is None


@pytest.mark.parametrize(
    ("target", "task", "words"),
    [
        ([1, 1, 1], "auto", "given.csv has one class only .'1'.; a classification needs at"),
        ([1.0, 2.5], "classification", "row 2.*must be text, a boolean or a whole number .got 2.5"),
        (["a", "b"], "regression", "a regression needs numbers .got 'a'.; .* set data.task to cl"),
        (["a", ""], "auto", "row 2, target 'y': '' stands for a missing label; mend or drop"),
        (["a", "NaN"], "auto", "row 2, target 'y': 'NaN' stands for a missing label"),
        (["a", "b\0"], "auto", "row 2, target 'y': 'b.x00' is not printable text"),
        ([1.0, np.nan], "auto", "row 2, target 'y': must be a number of at most 1e.15 .* .got nan"),
        ([1.0, np.inf], "regression", "row 2, target 'y': must be a number"),
        ([1.0, 1e38], "regression", "row 2, target 'y': must be a number .* .got 1e.38"),
        ([0, 1, -100], "auto", "row 3, target 'y': -100 is the label that losses skip"),
    ],
)
def test_labels_that_would_be_learnt_wrongly_are_refused_by_their_row(target, task, words):
    with pytest.raises(DataError, match=f"^data.target: .*{words}"):
        encode_target(_raw(target), task)


def test_several_columns_of_0_and_1_are_labels_and_other_numbers_are_amounts():
    several = encode_target(_raw([[0, 1, 1], [1, 0, 0]]), "auto")
    assert (several.task, several.outputs, several.class_names) == (
        "multilabel",
        3,
        ("0", "1", "2"),
    )
    assert several.values.tolist() == [[0, 1, 1], [1, 0, 0]] and several.values.dtype == np.float32
    amounts = encode_target(_raw([[0.5, 1.0], [1.0, 2.0]]), "auto")
    assert (amounts.task, amounts.outputs, amounts.class_names) == ("regression", 2, None)
    assert encode_target(_raw([[0, 1], [1, 0]]), "regression").task == "regression"


@pytest.mark.parametrize(
    ("target", "task", "words"),
    [
        (
            [[0, 1], [2, 0]],
            "multilabel",
            "^data.target: .* row 2, .*, column 1: must be 0 or 1 .got",
        ),
        ([[0, 1], [1, 0]], "classification", "^data.target: .* has 2 values a row, and a class is"),
        ([0, 1], "multilabel", "^data.task: multilabel needs a target of several columns"),
        (["a", "b"], "multilabel", "^data.target: .* a multilabel needs numbers .got 'a'"),
        (
            [[0.5, np.nan], [1, 0]],
            "auto",
            "^data.target: .* row 1, .* must be a number .* .got nan",
        ),
    ],
)
def test_a_target_whose_shape_does_not_fit_the_task_is_refused(target, task, words):
    with pytest.raises(DataError, match=words):
        encode_target(_raw(target), task)


def test_a_split_that_the_source_brought_is_taken_as_it_is():
    given = np.array([False, True, False, True])
    raw = replace(_raw([0, 0, 1, 1]), validation=given)
    assert (
        choose_validation_rows(raw, encode_target(raw, "auto"), fraction=0.9, seed=1) == given
    ).all()
    raw = replace(raw, validation=np.ones(4, dtype=bool))
    with pytest.raises(DataError, match="^data.source: given.csv has no training rows; give both"):
        choose_validation_rows(raw, encode_target(raw, "auto"), fraction=0.2, seed=0)


def test_minus_100_among_other_negative_numbers_is_a_class_like_any():
    assert encode_target(_raw([-100, -50, 0, 50]), "auto").class_names == ("-100", "-50", "0", "50")
    assert encode_target(_raw([-100.0, 0.5]), "regression").values.tolist() == [[-100.0], [0.5]]


def test_one_row_is_refused():
    with pytest.raises(DataError, match="^data.path: given.csv has 1 row; a split needs at least"):
        encode_target(_raw([1]), "auto")


# Split


def test_the_split_takes_its_fraction_of_each_class_and_of_all():
    raw = _raw(np.repeat([0, 1, 2, 3], [503, 297, 101, 7]))
    chosen = choose_validation_rows(raw, encode_target(raw, "auto"), fraction=0.2, seed=0)
    counts = [int(chosen[raw.target == c].sum()) for c in range(4)]
    assert sum(counts) == round(0.2 * 908)
    assert all(abs(n - 0.2 * of) < 1 for n, of in zip(counts, [503, 297, 101, 7], strict=True))


def test_every_class_is_in_both_parts_however_small_or_large_the_fraction():
    raw = _raw([0, 0, 1, 1, 1, 2, 2, 2, 2])
    for fraction in (0.001, 0.5, 0.999):
        chosen = choose_validation_rows(raw, encode_target(raw, "auto"), fraction=fraction, seed=3)
        for part in (chosen, ~chosen):
            assert set(raw.target[part].tolist()) == {0, 1, 2}


def test_the_split_follows_its_seed_and_nothing_else():
    raw = _raw(np.arange(1000) / 7)
    labels = encode_target(raw, "auto")
    first, same, other = (
        choose_validation_rows(raw, labels, fraction=0.2, seed=seed) for seed in (1, 1, 2)
    )
    assert (first == same).all() and (first != other).any() and first.sum() == 200


def test_the_split_owes_nothing_to_rows_that_their_user_drew_with_the_same_seed():
    """Story: houses made with default_rng(0) had the small ones, and no other, to validate on."""
    area = np.random.default_rng(0).random(1000)
    raw = _raw(area, area[:, None])
    chosen = choose_validation_rows(raw, encode_target(raw, "regression"), fraction=0.2, seed=0)
    assert abs(area[chosen].mean() - 0.5) < 0.1


def test_a_class_of_one_row_is_named():
    raw = _raw([0, 0, 1, 1, 7, 9])
    words = "^data.target: .* classes of one row.*: '7', '9'; add rows .* data.task to regression"
    with pytest.raises(DataError, match=words):
        choose_validation_rows(raw, encode_target(raw, "auto"), fraction=0.2, seed=0)


# Scale


def test_each_feature_is_scaled_by_the_training_rows_only():
    features = np.random.default_rng(0).normal([5, -1e6], [2, 1e-3], (500, 2))
    features[400:] += 100
    raw = _raw(np.arange(500) % 2, features)
    training = np.arange(500) < 400
    scaling = measure_scaling(raw, for_training=training, scale=True)
    np.testing.assert_allclose(scaling.offset, features[:400].mean(axis=0))
    np.testing.assert_allclose(scaling.scale, features[:400].std(axis=0), rtol=1e-5)
    x = np.concatenate([x for _, x in scale_features(raw, scaling)])[:400].astype(np.float64)
    np.testing.assert_allclose(x.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(x.std(axis=0), 1, atol=1e-5)


def test_images_are_scaled_by_all_their_pixels_together():
    pixels = np.random.default_rng(0).integers(0, 255, (20, 3, 4, 5), dtype=np.uint8)
    raw = _raw(np.arange(20) % 2, pixels, feature_names=None)
    scaling = measure_scaling(raw, for_training=np.ones(20, dtype=bool), scale=True)
    np.testing.assert_allclose([*scaling.offset, *scaling.scale], [pixels.mean(), pixels.std()])


def test_a_constant_feature_gets_scale_1_though_its_deviation_is_rounding():
    features = np.column_stack([np.full(1000, 0.1), np.full(1000, 1e20)])
    scaling = measure_scaling(
        _raw([0, 1] * 500, features), for_training=np.arange(1000) < 900, scale=True
    )
    assert scaling.scale.tolist() == [1.0, 1.0]
    np.testing.assert_allclose(scaling.offset, [0.1, 1e20])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e38])
def test_a_feature_that_is_no_usable_number_is_named_by_row_and_column(value):
    features = np.zeros((400_000, 2))
    features[300_000, 1] = value
    words = "^data.path: given.csv row 300001, column 'b': must be a number of at most 1e.30 in"
    with pytest.raises(DataError, match=words):
        raw = _raw(np.zeros(400_000), features)
        measure_scaling(raw, for_training=np.ones(400_000, dtype=bool), scale=False)


def test_a_validation_row_that_scaling_would_make_infinite_is_refused():
    raw = _raw([0, 1, 0], [[1e-25, 0], [2e-25, 0], [1e20, 0]])
    scaling = measure_scaling(raw, for_training=np.array([True, True, False]), scale=True)
    with pytest.raises(DataError, match="row 3, column 'a': lies more than 1e.30 deviations"):
        list(scale_features(raw, scaling))


# Prepared


def test_digits_are_prepared_once_and_the_second_run_reuses_them(tmp_path, caplog):
    config = _cached(tmp_path, DataConfig())
    preparation.check_data(config)
    first = preparation.prepare_dataset(config)
    assert (first.train_rows + first.val_rows, first.input_shape) == (1797, (1, 8, 8))
    assert (first.task, first.outputs, first.class_names) == (
        "classification",
        10,
        tuple("0123456789"),
    )
    assert not first.reused and Path(first.folder).parent == tmp_path / "cache"
    with caplog.at_level("INFO", logger="headroom"):
        assert preparation.prepare_dataset(config) == replace(first, reused=True)
    assert caplog.messages[-1].endswith(f"fingerprint {first.fingerprint}, prepared earlier")
    arrays = preparation.load_arrays(first)
    there = [a for a in vars(arrays).values() if a is not None]
    assert [a.dtype.str for a in there] == ["<f4", "<i8", "<f4", "<i8"]
    assert all(isinstance(a, np.memmap) and not a.flags.writeable for a in there)
    assert abs(float(arrays.train_x.mean())) < 1e-3 and abs(float(arrays.train_x.std()) - 1) < 1e-3
    assert first.bytes == sum(p.stat().st_size for p in Path(first.folder).glob("*.npy"))


def test_the_arrays_on_disk_are_what_offset_and_scale_say(tmp_path):
    facts = preparation.prepare_dataset(
        _csv(tmp_path, "a,b,y\n" + "".join(f"{i},7,{i}.5\n" for i in range(50)))
    )
    arrays = preparation.load_arrays(facts)
    assert (facts.task, facts.feature_names, facts.class_names) == ("regression", ("a", "b"), None)
    x = np.concatenate([arrays.train_x, arrays.val_x]) * facts.scale + facts.offset
    y = np.concatenate([arrays.train_y, arrays.val_y]) * facts.target_scale + facts.target_offset
    assert y.shape == (50, 1) and facts.scale[1] == 1.0
    np.testing.assert_allclose(x[:, 0] + 0.5, y[:, 0], atol=1e-5)


def test_without_scaling_the_values_stay_as_they_are(tmp_path):
    facts = preparation.prepare_dataset(_cached(tmp_path, DataConfig(scale=False)))
    assert (facts.offset, facts.scale) == ((0.0,), (1.0,))
    assert preparation.load_arrays(facts).train_x.max() == 16


def _amounts(tmp_path: Path, **more) -> DataConfig:
    """A date in seconds, a constant, and small amounts; of 100 rows."""
    y = np.array([[1.7e9 + i, 0.1, 1e-6 * (i % 7)] for i in range(100)])
    np.savez(tmp_path / "given.npz", x=np.arange(200.0).reshape(100, 2), y=y)
    return _cached(tmp_path, DataConfig(path=str(tmp_path / "given.npz"), **more))


def test_each_column_of_a_regressions_target_is_scaled_by_the_training_rows_only(tmp_path):
    facts = preparation.prepare_dataset(_amounts(tmp_path))
    arrays = preparation.load_arrays(facts)
    assert facts.task == "regression" and arrays.train_y.shape == (80, 3)
    np.testing.assert_allclose(arrays.train_y.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(arrays.train_y.std(0), [1, 0, 1], atol=1e-5)
    assert abs(float(arrays.val_y[:, 0].mean())) > 1e-3
    # float32 knows such a date to two minutes.
    dates = np.concatenate([arrays.train_y, arrays.val_y]) * facts.target_scale
    np.testing.assert_allclose(
        np.sort(dates[:, 0] + facts.target_offset[0]), 1.7e9 + np.arange(100), rtol=0, atol=1e-3
    )
    meaning = json.loads(Path(facts.folder, "manifest.json").read_text())["meaning"]
    assert meaning["target_scale"] == list(facts.target_scale) and facts.target_scale[1] == 1.0


def test_a_target_that_is_not_scaled_is_another_preparation(tmp_path):
    scaled_facts, plain = (
        preparation.prepare_dataset(_amounts(tmp_path, target_transform=transform))
        for transform in ("scale", "raw")
    )
    assert (plain.target_offset, plain.target_scale) == ((0.0,), (1.0,))
    assert plain.fingerprint != scaled_facts.fingerprint and plain.folder != scaled_facts.folder
    assert preparation.load_arrays(plain).train_y[:, 1].tolist() == [np.float32(0.1)] * 80


def test_a_validation_target_that_scaling_would_make_infinite_is_refused(tmp_path):
    y = np.where(np.arange(40) < 39, 1e-12 * np.arange(40), 1e15)
    x = np.zeros((40, 1))
    raw = _raw(y, x, validation=np.arange(40) >= 30)
    draft = preparation.draft_arrays(raw, DataConfig(task="regression"))
    with pytest.raises(DataError, match="row 40, target 'y': lies more than 1e.15 deviations"):
        draft.write(tmp_path)


def test_the_manifest_tells_what_was_prepared_from_what(tmp_path):
    config = _csv(tmp_path, "a,y\n" + "1,u\n2,v\n" * 10, validation_fraction=0.3)
    facts = preparation.prepare_dataset(config)
    manifest = json.loads(Path(facts.folder, "manifest.json").read_text())
    assert manifest["meaning"]["class_rows"] == {"train": [7, 7], "val": [3, 3]}
    assert manifest["source"]["path"] == config.path and manifest["source"]["bytes"] == 84
    assert manifest["settings"]["validation_fraction"] == 0.3
    assert manifest["files"]["val_x.npy"]["shape"] == [6, 1]


def test_the_fingerprint_follows_the_content_and_not_the_place(tmp_path):
    facts = preparation.prepare_dataset(_cached(tmp_path / "one"))
    assert preparation.prepare_dataset(_cached(tmp_path / "two")).fingerprint == facts.fingerprint
    for change in ({"split_seed": 1}, {"scale": False}, {"rows": 61}, {"validation_fraction": 0.3}):
        other = preparation.prepare_dataset(_cached(tmp_path, change_config(SYNTHETIC, **change)))
        assert other.fingerprint != facts.fingerprint
    assert len(facts.fingerprint) == 16 and int(facts.fingerprint, 16) >= 0


def test_synthetic_classes_stay_classes_however_many(tmp_path):
    config = DataConfig(source="synthetic", args={"rows": 600, "features": 2, "classes": 200})
    facts = preparation.prepare_dataset(_cached(tmp_path, config))
    assert (facts.task, facts.outputs) == ("classification", 200)
    config = DataConfig(source="synthetic", args={"rows": 100, "features": 2, "classes": 1})
    assert preparation.prepare_dataset(_cached(tmp_path, config)).task == "regression"


# Cache


def test_a_changed_file_is_prepared_anew_even_with_the_same_size_and_time(tmp_path):
    config = _csv(tmp_path, "a,y\n" + "1,0\n2,1\n" * 10)
    before, stat = preparation.prepare_dataset(config), os.stat(str(config.path))
    held = preparation.load_arrays(before)
    Path(str(config.path)).write_text("a,y\n" + "1,0\n9,1\n" * 10)
    os.utime(str(config.path), ns=(stat.st_atime_ns, stat.st_mtime_ns))
    after = preparation.prepare_dataset(config)
    assert not after.reused and after.fingerprint != before.fingerprint
    assert after.folder != before.folder
    assert (
        preparation.load_arrays(before).train_x == held.train_x
    ).all()  # what a run has mapped stays


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    config = _csv(tmp_path, "a,y\n" + "1,0\n2,1\n" * 10)
    encode_then = preparation.encode_target

    def append(raw, task):
        with open(str(config.path), "a") as file:
            file.write("3,1\n")
        return encode_then(raw, task)

    monkeypatch.setattr(preparation, "encode_target", append)
    with pytest.raises(
        DataError, match="^data.path: .* was changed while it was read; start again"
    ):
        preparation.prepare_dataset(config)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("part", [*preparation.PARTS, "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_cache_is_noticed_and_prepared_anew(tmp_path, caplog, part, damage):
    config = _cached(tmp_path)
    first = preparation.prepare_dataset(config)
    path = Path(first.folder, part)
    content = bytearray(path.read_bytes())
    # Of the manifest, its fingerprint: no check covers the settings that it shows.
    content[content.index(b'fingerprint": "') + 15 if part == "manifest.json" else -20] ^= 1
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(content if damage == "flip" else content[:-8])
    again = preparation.prepare_dataset(config)
    assert "is prepared anew" in caplog.text
    assert again == first and preparation.prepare_dataset(config).reused
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [Path(first.folder).name]


def test_large_prepared_arrays_are_not_used_unchecked(tmp_path, caplog):
    """Above 64 MiB only sizes were looked at, and a damaged block was trained on."""
    config = change_config(_cached(tmp_path), rows=70_000, features=256)
    first = preparation.prepare_dataset(config)
    assert first.bytes > 64 * 1024**2
    with open(Path(first.folder, "train_x.npy"), "r+b") as file:
        file.seek(40_000_003)
        byte = file.read(1)[0]
        file.seek(40_000_003)
        file.write(bytes([byte ^ 16]))
    again = preparation.prepare_dataset(config)
    assert "train_x.npy has other content than it was written with" in caplog.text
    assert again == first and preparation.prepare_dataset(config).reused


PREPARE = (
    "import os, sys; from headroom.data import preparation as data; "
    "from headroom.data import prepared_cache as store; "
    "from headroom.settings.run_config import *; "
    "args = dict(rows=60, features=3, classes=3); "
    "config = DataConfig(source='synthetic', args=args, cache=sys.argv[1]); "
)


def _start(code: str, cache: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", PREPARE + code, str(cache)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_many_that_prepare_the_same_at_once_all_get_the_same(tmp_path):
    code = "facts = data.prepare_dataset(config); x = data.load_arrays(facts).train_x; "
    code += "print(facts.fingerprint, x.sum())"
    started = [_start(code, tmp_path) for _ in range(4)]
    answers = {process.communicate()[0] for process in started}
    assert len(answers) == 1 and answers.pop().strip()
    assert len(list(tmp_path.iterdir())) == 1


def test_the_later_of_two_uses_what_the_earlier_left(tmp_path, monkeypatch):
    config, first = _cached(tmp_path), []
    written = preparation._write_arrays

    def overtaken(*args, **more):
        monkeypatch.setattr(preparation, "_write_arrays", written)
        first.append(preparation.prepare_dataset(config))
        return written(*args, **more)

    monkeypatch.setattr(preparation, "_write_arrays", overtaken)
    assert preparation.prepare_dataset(config) == replace(first[0], reused=True)
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_kill_just_before_the_end_leaves_no_half_cache_and_is_swept_later(tmp_path):
    started = _start(
        "store._rename_folder = lambda *_: os.kill(os.getpid(), 9); data.prepare_dataset(config)",
        tmp_path,
    )
    started.communicate()
    assert started.returncode == -9
    (left,) = tmp_path.iterdir()
    assert left.name.endswith(".tmp")
    config = SYNTHETIC.model_copy(update={"cache": str(tmp_path)})
    facts = preparation.prepare_dataset(config)
    assert not facts.reused and left.exists()  # too young to tell from one just being made
    os.utime(left, (time.time() - 120,) * 2)
    prepared_cache.remove_stale_folders(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [Path(facts.folder).name]


def test_the_temporary_folder_of_a_writer_that_lives_is_not_swept(tmp_path):
    mine = tmp_path / ".digits.tmp"
    mine.mkdir()
    os.utime(mine, (0, 0))
    lock = os.open(mine, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    prepared_cache.remove_stale_folders(tmp_path)
    assert mine.exists()
    os.close(lock)
    prepared_cache.remove_stale_folders(tmp_path)
    assert not mine.exists()


def test_a_disk_that_fills_up_is_told_by_data_cache_and_nothing_is_left(tmp_path):
    config = _cached(tmp_path, DataConfig(source="synthetic", args={"rows": 2000, "features": 20}))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(DataError, match="^data.cache: .* cannot be written .File too large"):
            preparation.prepare_dataset(config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((tmp_path / "cache").iterdir()) == []
    assert not preparation.prepare_dataset(config).reused


def test_a_disk_without_room_is_told_before_anything_is_written(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr("headroom.data.prepared_cache.shutil.disk_usage", lambda _: usage)
    for step in (preparation.check_data, preparation.prepare_dataset):
        with pytest.raises(DataError, match="^data.cache: .* needs .* and has .* free; make"):
            step(_cached(tmp_path))
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_a_folder_is_refused_by_the_check(tmp_path):
    (tmp_path / "file").touch()
    for cache, words in {
        str(tmp_path / "file" / "data"): "lies under .*file, a file; name another folder",
        " ": "must name a folder",
    }.items():
        with pytest.raises(DataError, match=f"^data.cache: {words}|^data.cache: .* {words}"):
            preparation.check_data(DataConfig(cache=cache))


def test_a_cache_that_another_user_owns_is_told_with_both_remedies(tmp_path, monkeypatch):
    """A folder that Docker made is root's: "must not be written" was no sentence to act on."""
    monkeypatch.setattr("headroom.data.prepared_cache.os.access", lambda *_: False)
    words = "^data.cache: this user may not write in .*; name another folder, or `chown` it$"
    with pytest.raises(DataError, match=words):
        preparation.check_data(_cached(tmp_path))


def test_a_cache_on_a_read_only_file_system_is_told_what_helps(tmp_path, monkeypatch):
    """It was told to `chown` the folder, which such a file system refuses."""
    before = os.statvfs

    def mount_read_only(path):
        found = list(before(path))
        found[8] |= os.ST_RDONLY  # f_flag
        return os.statvfs_result(found)

    monkeypatch.setattr("headroom.data.prepared_cache.os.statvfs", mount_read_only)
    words = "^data.cache: .* lies on a file system that is mounted read-only; name another folder$"
    with pytest.raises(DataError, match=words):
        preparation.check_data(_cached(tmp_path))


def test_a_write_that_the_disk_refuses_keeps_its_reason(tmp_path):
    words = "^data.cache: .* .No space left on device.; make room"
    with pytest.raises(DataError, match=words), prepared_cache.refuse_unwritable(tmp_path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_arrays_that_are_gone_are_told_by_data_cache(tmp_path):
    facts = preparation.prepare_dataset(_cached(tmp_path))
    Path(facts.folder, "val_y.npy").unlink()
    with pytest.raises(DataError, match="^data.cache: the arrays in .* are gone or damaged"):
        preparation.load_arrays(facts)
