"""Texts and files of tokens: what is read, how it is cut and split, and every refusal."""

import io
import json
import logging
import math
import pickle
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headroom.base.facts import DataFacts
from headroom.data import preparation, prepared_cache, tokens
from headroom.data.source_data import DataError
from headroom.device.detection import detect_best_device
from headroom.models import predictor
from headroom.settings.run_config import (
    DataConfig,
    OptimConfig,
    RunConfig,
)
from headroom.training import trainer
from headroom.training.plan import make_plan
from tests.data.configs import change_config, make_data_config

COUNT = np.arange(100, dtype=np.uint16)


@pytest.fixture(autouse=True)
def _no_prefect_handlers(monkeypatch):
    """Prefect, once imported, warns of each line that is logged outside a flow."""
    monkeypatch.setattr(logging.getLogger("headroom"), "handlers", [])


def _npy(array) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _config(tmp_path: Path, content: bytes, *, name: str = "given.npy", **more) -> DataConfig:
    (tmp_path / name).write_bytes(content)
    settings = {"source": "tokens", "context": 4, "cache": str(tmp_path / "cache")}
    return make_data_config(path=str(tmp_path / name), **{**settings, **more})


def _prepared(config: DataConfig) -> DataFacts:
    preparation.check_data(config)
    return preparation.prepare_dataset(config)


# Rows


def test_rows_of_the_context_follow_each_other_and_targets_are_one_token_on(tmp_path):
    facts = _prepared(_config(tmp_path, _npy(COUNT), validation_fraction=0.25))
    arrays = preparation.load_arrays(facts)
    assert (facts.task, facts.source, facts.input_shape) == ("tokens", "tokens", (4,))
    assert (facts.outputs, facts.class_names, facts.feature_names) == (100, None, None)
    assert (facts.offset, facts.scale) == ((0.0,), (1.0,))
    assert (facts.train_rows, facts.val_rows) == (18, 6)
    assert arrays.train_x.tolist() == [[4 * i + k for k in range(4)] for i in range(18)]
    assert arrays.val_x.tolist() == [[75 + 4 * i + k for k in range(4)] for i in range(6)]
    for x, y in ((arrays.train_x, arrays.train_y), (arrays.val_x, arrays.val_y)):
        assert (y == x + 1).all()
        assert np.shares_memory(x, y) and isinstance(x, np.memmap) and not x.flags.writeable
        assert len(x) and x.dtype == y.dtype == np.uint8


@settings(deadline=None, max_examples=50)
@given(
    count=st.integers(4, 300),
    context=st.integers(1, 40),
    fraction=st.floats(0.001, 0.999),
    block=st.integers(1, 64),
)
def test_no_token_is_in_both_parts_and_few_in_none(
    tmp_path_factory, count, context, fraction, block
):
    config = DataConfig(source="text", validation_fraction=fraction, args={"context": context})
    text = tokens.Tokens(np.arange(count), vocabulary=1000, label="made up")
    assume(count >= 2 * (context + 1))
    folder = tmp_path_factory.mktemp("rows")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "BLOCK_TOKENS", block)
        draft = preparation.draft_tokens(text, config)
        draft.write(folder)
    texts = [np.load(folder / name) for name in preparation.TOKEN_PARTS]
    assert sum(text.nbytes for text in texts) == draft.needed_bytes
    train, val = (
        np.concatenate([x, y[:, -1:]], 1)
        for x, y in (preparation.view_token_rows(text, context) for text in texts)
    )
    assert len(train) and len(val) and train.max() < val.min()
    for rows in (train, val):
        assert rows.dtype == np.uint16 and rows.shape[1] == context + 1
        assert (np.diff(rows, axis=1) == 1).all()
        assert (rows[1:, 0] == rows[:-1, -1]).all()
    covered = len(np.unique(train)) + len(np.unique(val))
    assert train.min() == 0 and 0 <= count - covered <= 2 * (context - 1)
    asked = round(count * fraction)
    if context < asked < count - context:
        assert val.min() == count - asked


@pytest.mark.parametrize("largest", [255, 256, 32768, 65535])
def test_tokens_keep_their_numbers_in_the_narrowest_type(tmp_path, largest):
    values = np.array([0, 1, largest] * 10)
    facts = _prepared(_config(tmp_path, _npy(values)))
    rows = preparation.load_arrays(facts).train_x
    assert facts.outputs == largest + 1
    assert rows.dtype == (np.uint8 if largest < 256 else np.uint16) and rows.max() == largest


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", "<i4", ">i8", "<u8"])
def test_an_npy_file_may_hold_any_whole_numbers(tmp_path, dtype):
    facts = _prepared(_config(tmp_path, _npy(COUNT.astype(dtype))))
    assert (preparation.load_arrays(facts).train_x[0] == [0, 1, 2, 3]).all()


def test_a_bin_file_holds_16_bit_numbers(tmp_path):
    values = np.array([50256, 7, 300] * 20, dtype="<u2")
    facts = _prepared(_config(tmp_path, values.tobytes(), name="given.bin"))
    npy = _prepared(_config(tmp_path, _npy(values)))
    assert facts.outputs == 50257 and facts.fingerprint == npy.fingerprint
    assert preparation.load_arrays(facts).train_x[0].tolist() == [50256, 7, 300, 50256]


def test_a_bin_file_may_begin_with_any_token(tmp_path):
    for first in (b"\x1f\x8b", b"\xff\xfe", b"\x80\x04"):  # gzip, UTF-16 and pickle begin so
        config = _config(tmp_path, first + COUNT.tobytes(), name="given.bin")
        assert preparation.load_arrays(_prepared(config)).train_x[0, 0] == int.from_bytes(
            first, "little"
        )


def test_a_given_vocabulary_counts_and_not_what_the_file_happens_to_hold(tmp_path):
    facts = _prepared(_config(tmp_path, _npy(COUNT), vocab=50257))
    assert facts.outputs == 50257 and preparation.load_arrays(facts).train_x.dtype == np.uint16


def test_a_file_larger_than_a_block_is_read_in_blocks(tmp_path, monkeypatch):
    values = np.random.default_rng(0).integers(0, 5000, 2_000_003).astype(np.uint16)
    whole = _prepared(_config(tmp_path, _npy(values)))
    monkeypatch.setattr(tokens, "BLOCK_TOKENS", 10_000)
    monkeypatch.setattr(preparation, "BLOCK_TOKENS", 9_999)
    other = _config(tmp_path, _npy(values), cache=str(tmp_path / "other"))
    tracemalloc.start()
    cut = preparation.prepare_dataset(other)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert cut.fingerprint == whole.fingerprint and not cut.reused
    assert peak_bytes < values.nbytes / 4
    values[1_777_777] = 60000
    with pytest.raises(DataError, match="token 1,777,778: must be below 5,000 .got 60,000.; raise"):
        preparation.prepare_dataset(_config(tmp_path, _npy(values), vocab=5000))


# Text


def test_text_is_the_bytes_of_any_file(tmp_path):
    content = "z\u00fcrich ".encode() * 5 + b"\0\xff"
    config = _config(tmp_path, content, name="notes", source="text", validation_fraction=0.1)
    facts = _prepared(config)
    assert (facts.task, facts.source, facts.outputs) == ("tokens", "text", 256)
    arrays = preparation.load_arrays(facts)
    assert bytes(arrays.train_x[:2].ravel()) == content[:8]
    assert bytes(arrays.val_y[-1]) == content[-4:]


def test_the_default_text_is_that_of_this_python_and_the_same_each_time(tmp_path):
    config = DataConfig(source="text", cache=str(tmp_path))
    facts = _prepared(config)
    assert preparation.prepare_dataset(config) == replace(facts, reused=True)
    arrays = preparation.load_arrays(facts)
    text = bytes(arrays.train_x.ravel())
    assert b"PYTHON SOFTWARE FOUNDATION LICENSE" in text and b"assert" in text
    assert facts.train_rows > 1000 and facts.outputs == 256
    said = (
        "import hashlib; from headroom.data.tokens import build_default_text; "
        "print(hashlib.sha256(build_default_text()).hexdigest())"
    )
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True)
    manifest = json.loads(Path(facts.folder, "manifest.json").read_text())
    assert manifest["source"]["sha256"] == done.stdout.strip()
    assert manifest["source"]["path"] is None


@pytest.fixture
def bare_python(tmp_path, monkeypatch):
    """A Python that was installed without its licence and its documentation."""
    folder = tmp_path / "python" / "lib"
    folder.mkdir(parents=True)
    monkeypatch.setattr(tokens.sysconfig, "get_path", lambda name: str(folder))
    monkeypatch.setitem(sys.modules, "pydoc_data", None)
    tokens.build_default_text.cache_clear()
    yield folder
    tokens.build_default_text.cache_clear()


def test_a_python_without_licence_and_documentation_needs_a_file(bare_python):
    with pytest.raises(DataError, match="^data.path: is needed for source text, since the Python"):
        preparation.check_data(DataConfig(source="text"))


def test_either_the_licence_or_the_documentation_will_do(bare_python):
    (bare_python.parent / "LICENSE").write_text("May be used. " * 100)
    preparation.check_data(DataConfig(source="text"))
    assert tokens.build_default_text() == b"May be used. " * 100


# Reuse


def test_the_second_preparation_reuses_the_first_and_only_what_counts_makes_another(tmp_path):
    config = _config(tmp_path, _npy(COUNT))
    first = _prepared(config)
    assert preparation.prepare_dataset(config) == replace(first, reused=True)
    unused = {"split_seed": 3, "scale": False, "task": "tokens"}
    assert preparation.prepare_dataset(change_config(config, **unused)) == replace(
        first, reused=True
    )
    for change in ({"context": 5}, {"vocab": 200}, {"validation_fraction": 0.3}):
        other = preparation.prepare_dataset(change_config(config, **change))
        assert other.fingerprint != first.fingerprint and not other.reused
    (tmp_path / "given.npy").write_bytes(_npy(COUNT[::-1]))
    assert not preparation.prepare_dataset(config).reused


def test_the_settings_of_tokens_make_no_other_table(tmp_path):
    config = DataConfig(source="synthetic", cache=str(tmp_path), args={"rows": 60})
    first = preparation.prepare_dataset(config)
    with pytest.raises(ValueError, match="synthetic takes rows, features, classes"):
        change_config(config, context=7)
    assert preparation.prepare_dataset(config) == replace(first, reused=True)


@pytest.mark.parametrize("part", [*preparation.TOKEN_PARTS, "manifest.json"])
def test_damaged_rows_of_tokens_are_noticed_and_prepared_anew(tmp_path, caplog, part):
    config = _config(tmp_path, _npy(COUNT))
    first = _prepared(config)
    path = Path(first.folder, part)
    content = bytearray(path.read_bytes())
    # Of the manifest, its fingerprint: no check covers the settings that it shows.
    content[content.index(b'fingerprint": "') + 15 if part == "manifest.json" else -20] ^= 1
    path.write_bytes(content)
    assert preparation.prepare_dataset(config) == first
    assert "is prepared anew" in caplog.text


def test_rows_of_tokens_that_are_gone_are_told_by_data_cache(tmp_path):
    facts = _prepared(_config(tmp_path, _npy(COUNT)))
    Path(facts.folder, "val.npy").unlink()
    with pytest.raises(DataError, match="^data.cache: the arrays in .* are gone or damaged"):
        preparation.load_arrays(facts)


def test_a_disk_without_room_for_the_rows_is_told_before_they_are_written(tmp_path, monkeypatch):
    config = _config(tmp_path, _npy(COUNT))
    usage = type("Usage", (), {"free": 50})
    monkeypatch.setattr(prepared_cache.shutil, "disk_usage", lambda _: usage)
    preparation.check_data(config)
    with pytest.raises(DataError, match="^data.cache: .* needs .* and has .* free; make room"):
        preparation.prepare_dataset(config)
    assert not (tmp_path / "cache").exists()


# Refusals, found by the check: nothing but the head of a file was read

OBJECTS = _npy(np.array([{}, 1], dtype=object))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"plain text", "a.txt must end in .npy .*; rename it, or for plain text set"),
        ("a.npy", b"", "is empty"),
        ("a.bin", b"", "is empty"),
        ("a.npy", COUNT.tobytes(), r"a.npy is no array .*; save it anew with"),
        ("a.npy", pickle.dumps([1, 2]), "a pickle is never loaded"),
        ("a.npy", OBJECTS, r"an array of Python objects \(a pickle\), which is never loaded"),
        ("a.npy", _npy(COUNT)[:-3], "it is cut off; write it anew"),
        ("a.npy", _npy(COUNT / 2), r"must hold whole numbers \(got float64\); save it with"),
        ("a.npy", _npy(COUNT > 5), r"must hold whole numbers \(got bool\)"),
        ("a.npy", _npy(COUNT.astype("U3")), r"must hold whole numbers \(got <U3\)"),
        ("a.npy", _npy(COUNT.reshape(10, 10)), r"shape \(n,\) \(got \(10, 10\)\); save it with"),
        ("a.npy", _npy(np.uint16(3)), r"shape \(n,\) \(got \(\)\)"),
        ("a.bin", b"123", r"an even count of bytes \(got 3\); copy"),
        ("a.bin", _npy(COUNT), "a.bin is an NPY file; rename it to end in .npy"),
        (
            "a.bin",
            np.array([20240520, 1, 100] + [0] * 253, dtype="<i4").tobytes() + COUNT.tobytes(),
            "a.bin begins with a header of llm.c, which would be read as tokens; save the tokens",
        ),
    ],
)
def test_a_file_that_holds_no_tokens_is_refused_by_its_head(tmp_path, name, content, words):
    with pytest.raises(DataError, match=f"^data.path: .*{words}") as refused:
        preparation.check_data(_config(tmp_path, content, name=name))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("source", ["text", "tokens"])
def test_a_path_without_a_file_is_refused(tmp_path, source):
    cases = {"none.npy": "does not exist; name", ".": f"is a folder; name the {source} file in it"}
    for name, words in cases.items():
        with pytest.raises(DataError, match=f"^data.path: .*{words}"):
            preparation.check_data(DataConfig(source=source, path=str(tmp_path / name)))


def test_too_short_a_text_is_refused_with_the_length_it_needs(tmp_path):
    enough = _config(tmp_path, b"x" * 10, name="notes", source="text")
    facts = _prepared(enough)
    assert (facts.train_rows, facts.val_rows) == (1, 1)
    words = (
        r"^data.args.context: notes has 9 tokens, and a row of 4 for training and one for "
        r"validation, each with the token after it, need 10; lower "
        r"data.args.context, or use a longer text$"
    )
    with pytest.raises(DataError, match=words):
        preparation.check_data(_config(tmp_path, b"x" * 9, name="notes", source="text"))
    for name, content in {"a.npy": _npy(COUNT[:9]), "a.bin": COUNT[:9].tobytes()}.items():
        with pytest.raises(DataError, match=f"^data.args.context: {name} has 9 tokens"):
            preparation.check_data(_config(tmp_path, content, name=name))
    with pytest.raises(DataError, match="^data.args.context: Python's own text has .* tokens"):
        preparation.check_data(DataConfig(source="text", args={"context": 2**20}))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"target": "y"}, "^data.target: has no meaning for source text .got 'y'.; drop it"),
    ],
)
def test_settings_without_a_meaning_for_text_are_refused(more, words):
    with pytest.raises(DataError, match=words):
        preparation.check_data(make_data_config(source="text", **more))
    with pytest.raises(ValueError, match="text takes context, and none of this name"):
        make_data_config(source="text", vocab=128)


def test_a_target_has_no_meaning_for_tokens(tmp_path):
    with pytest.raises(DataError, match="^data.target: has no meaning for source tokens"):
        preparation.check_data(_config(tmp_path, _npy(COUNT), target="y"))


@pytest.mark.parametrize(
    ("value", "more", "words"),
    [
        (-1, {}, r"^data.path: given.npy token 51: must be at least 0 \(got -1\); tokens are"),
        (-1, {"vocab": 200}, "^data.path: given.npy token 51: must be at least 0"),
        (65536, {}, r"^data.path: .* token 51: must be below 65,536 \(got 65,536\); use a tokeni"),
        (
            200,
            {"vocab": 200},
            r"^data.args.vocab: .* token 51: must be below 200 \(got 200\); raise",
        ),
    ],
)
def test_what_is_no_token_is_refused_by_its_place(tmp_path, value, more, words):
    values = COUNT.astype(np.int64)
    values[50] = value
    with pytest.raises(DataError, match=words):
        preparation.prepare_dataset(_config(tmp_path, _npy(values), **more))
    assert not (tmp_path / "cache").exists()


def test_a_text_of_one_token_is_refused(tmp_path):
    with pytest.raises(DataError, match="^data.path: given.npy holds token 0 alone"):
        preparation.prepare_dataset(_config(tmp_path, _npy(0 * COUNT)))


# Settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"source": "tokens"}, "path: is needed for source tokens; name the file"),
        ({"source": "text", "path": ""}, "path: is needed for source text; name the file"),
        ({"source": "digits", "path": "a"}, "set data.source to one of csv, .*, text, tokens"),
        ({"source": "text", "task": "regression"}, "task: must be auto or tokens for source text"),
        ({"task": "tokens"}, r"task: tokens needs source text or tokens \(got digits\)"),
        ({"source": "text", "context": 0}, "greater than or equal to 1"),
        ({"source": "tokens", "path": "a.npy", "vocab": 65537}, "less than or equal to 65536"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        make_data_config(**settings)
    DataConfig(source="text", task="tokens")


# Trained


def test_a_transformer_learns_the_default_text_and_the_saved_one_goes_on_with_it(tmp_path):
    text = tokens.build_default_text()[:100_000]  # the rest would take seconds more
    config = RunConfig(
        data=_config(
            tmp_path, text, name="text", source="text", context=32, validation_fraction=0.1
        ),
        model={"name": "transformer", "args": {"layers": 1, "heads": 2, "width": 32}},
        optim=OptimConfig(lr=5e-3),
        train={"epochs": 1, "batch_size": 4},
    )
    facts = _prepared(config.data)
    done = trainer.train(
        make_plan(config, detect_best_device("cpu"), facts),
        folder=tmp_path,
        log=lambda metrics, step: None,
    )
    known = np.bincount(np.frombuffer(text, np.uint8)) / len(text)
    by_frequency_alone = math.exp(-(known[known > 0] * np.log(known[known > 0])).sum())
    assert 2 < done.metrics["val/perplexity"] < by_frequency_alone / 1.5
    speed = done.metrics["speed/samples_per_s"]
    assert done.metrics["speed/tokens_per_s"] == pytest.approx(32 * speed)

    loaded = predictor.load(done.model_folder)
    val = preparation.load_arrays(facts).val_x[:500].astype(np.int64)
    hits = loaded.outputs([bytes(row[:-1]).decode("latin-1") for row in val.tolist()]).argmax(1)
    most_frequent = (val[:, -1] == known.argmax()).mean()
    assert (hits == val[:, -1]).mean() > 1.3 * most_frequent
    assert loaded.predict(["you are usin"])["prediction"].str.len().tolist() == [1]
