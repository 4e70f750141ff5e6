"""Makes one prediction from an order to a file: the model on its device, the rows of the input
through it a few at a time, their predictions into the output in the same order. Where memory
runs out, fewer rows go through together, by halves, and the same rows are done again; it gives
up at one row. Everything that holds device memory lives and dies inside `predict`, also when
it raises.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import pyarrow as pa
import torch

from headroom.base.facts import DeviceFacts, ModelFacts, PredictFacts
from headroom.base.import_paths import forbid_exit
from headroom.data.source_data import DataError, shorten
from headroom.device.memory_limit import limit_memory
from headroom.models import predictor
from headroom.models.checksums import check_checksums
from headroom.prediction.input_batches import (
    Batch,
    Needs,
    check_rows,
    count_rows,
    cut_rows,
    find_first_hole,
    measure_amount,
    read_batches,
    read_needs,
)
from headroom.prediction.output_files import open_output
from headroom.prediction.request import Order
from headroom.prediction.unseen_texts import UnseenTexts
from headroom.settings.model_args import ModelError
from headroom.watch import memory_meter, out_of_memory
from headroom.watch.allocators import drop_cache

log = logging.getLogger(__name__)

MOST_ROWS = 4096  # that go through the model together
MOST_BYTES = 16 * 1024**2  # of their inputs
MOST_TOKENS = 1 << 14
BROKEN_MODEL = (  # what reading files that were cut or changed raises
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    UnpicklingError,
)


class NoRoom(RuntimeError):
    """Memory does not suffice for one row, or for the model."""


class Model(Protocol):
    """See predictor.py."""

    def predict(self, rows: Any) -> Any: ...


class ProgressCallback(Protocol):
    """Is called with how far a prediction is: rows, and how much of the input's amount is done."""

    def __call__(self, rows: int, done: int) -> None: ...


def read_spec(model: ModelFacts) -> dict[str, Any]:
    """Read the model's description of itself. Raises ModelError where that can't be read."""
    check_checksums(Path(model.folder), "spec.json")
    try:
        spec: dict[str, Any] = json.loads((Path(model.folder) / "spec.json").read_text())
        read_needs(spec)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"run: the model of {model.run_id} has no description that can be read "
            f"({type(error).__name__}: {error}); choose another run"
        ) from None
    return spec


def check_order(order: Order, model: ModelFacts) -> None:
    """Refuse rows that the model can't take, by the head of the file.

    Raises DataError or ModelError.
    """
    check_rows(order, read_needs(read_spec(model)))


def measure_total(order: Order, model: ModelFacts) -> int:
    """Return how much there is to do, in the units that `told` is called with."""
    return measure_amount(order, read_needs(read_spec(model)))


def predict(
    order: Order, device: DeviceFacts, model: ModelFacts, *, show_progress: ProgressCallback
) -> PredictFacts:
    """Predict every row of the input into the output. The frames of an exception hold no tensor.

    Raises DataError for rows that do not fit, NoRoom where memory does not do, OutputError.
    """
    try:
        return _predict_all(order, device, model, show_progress=show_progress)
    except BaseException as error:
        # Prefect keeps the exception of a failed task, and with it every tensor of its frames.
        out_of_memory.clear_frames(error)
        if isinstance(error, NoRoom):
            failure = str(error)
        elif out_of_memory.is_oom(error):
            failure = f"the model ({error or type(error).__name__})"
        else:
            raise
    raise NoRoom(_describe_no_room(order, device, failure))


@forbid_exit
def _predict_all(
    order: Order, facts: DeviceFacts, model: ModelFacts, *, show_progress: ProgressCallback
) -> PredictFacts:
    device = torch.device(facts.name)
    spec = read_spec(model)
    needs = read_needs(spec)
    rows = 0
    with limit_memory(facts, order.limit_mib):
        through = RowPredictor(_load_model(model).to(device), device, needs)
        width = max(map(len, spec.get("class_names") or [""]))
        began = time.perf_counter()
        unseen = UnseenTexts(spec)
        with open_output(order, text_width=width) as output:
            for batch in read_batches(order, needs):
                unseen.add(batch)
                for begin, predictions in through.predict_batch(batch):
                    output.write(_join_kept(batch, begin, predictions))
                    rows += len(predictions)
                    show_progress(rows, batch.done)
        held_bytes = memory_meter.count_allocated_bytes(device)
    if told_of := unseen.describe():
        log.warning("%s", told_of)
    return PredictFacts(
        output=order.output,
        rows=rows,
        rows_at_once=through.rows,
        recovered=through.recovered,
        predict_s=time.perf_counter() - began,
        held_bytes=held_bytes,
        warnings=(told_of,) if told_of else (),
    )


def choose_rows_at_once(needs: Needs) -> int:
    """Return the rows to begin with: enough to keep a device busy, and few enough for small
    ones."""
    if needs.task == "tokens" or needs.is_own:
        return max(1, MOST_TOKENS // needs.width)
    return max(1, min(MOST_ROWS, MOST_BYTES // (4 * needs.width)))


def _load_model(model: ModelFacts) -> predictor.Predictor | predictor.TokenPredictor:
    try:
        return predictor.load(model.folder)
    except (ModelError, MemoryError):
        raise
    except BROKEN_MODEL as error:
        if out_of_memory.is_oom(error):
            raise
        said = shorten(str(error) or type(error).__name__, 300)
    raise ModelError(f"run: the model of {model.run_id} cannot be loaded ({said}); train it anew")


class RowPredictor:
    """Runs rows through a model, as many together as memory allows."""

    def __init__(self, model: Model, device: torch.device, needs: Needs) -> None:
        self._model, self._device = model, device
        self._has_columns = needs.columns is not None  # and knows what to do about holes in them
        self.rows = choose_rows_at_once(needs)
        self.recovered = 0

    def predict_batch(self, batch: Batch) -> Iterator[tuple[int, Any]]:
        """Yield where each part of the batch begins, and its predictions; one even of no rows."""
        begin, total = 0, count_rows(batch.rows)
        hole = None if self._has_columns else find_first_hole(batch.rows)
        if hole is not None:
            raise DataError(
                f"input: {batch.at(hole)}: holds a missing or infinite number, of which the model "
                "knows nothing; fill it in, or drop the row"
            )
        while begin < total or begin == 0:
            predictions = self._predict_fitting(batch, begin)
            yield begin, predictions
            begin += max(1, len(predictions))

    def _predict_fitting(self, batch: Batch, begin: int) -> Any:
        while True:
            failure = None
            rows = min(self.rows, max(1, count_rows(batch.rows) - begin))
            try:
                return self._attempt(batch, begin, begin + rows)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory.is_oom(error):
                    raise
                out_of_memory.clear_frames(error)
                failure = str(error) or type(error).__name__
            # Only here, outside the except block, is the error gone and what its frames held.
            drop_cache(self._device)
            if rows == 1:
                raise NoRoom(f"one row ({failure})")
            self.rows = -(-rows // 2)
            log.warning(
                "short of memory with %s rows at once: going on with %s (%s)",
                rows,
                self.rows,
                failure,
            )
            self.recovered += 1

    def _attempt(self, batch: Batch, begin: int, end: int) -> Any:
        try:
            return self._model.predict(cut_rows(batch.rows, begin, end))
        except ValueError as error:
            said = str(error)
        raise DataError(
            self._find_refused_row(batch, begin, min(end, count_rows(batch.rows)), said)
        )

    def _find_refused_row(self, batch: Batch, begin: int, end: int, said: str) -> str:
        """The sentence about the first row that the model refuses, found by halving."""
        while end - begin > 1:
            middle = (begin + end) // 2
            try:
                self._model.predict(cut_rows(batch.rows, begin, middle))
                begin = middle
            except ValueError as error:
                end, said = middle, str(error)
        return f"input: {batch.at(begin)}: {said.removeprefix('rows: ')}"


def _join_kept(batch: Batch, begin: int, predictions: Any) -> pa.Table:
    """The kept columns and the predictions of some rows as one table, text as text."""
    table = pa.Table.from_pandas(predictions, preserve_index=False).replace_schema_metadata()
    for i, field in enumerate(table.schema):
        if pa.types.is_large_string(field.type) or pa.types.is_null(field.type):
            table = table.set_column(i, field.name, table[i].cast(pa.string()))
    if batch.kept is None:
        return table
    taken = [name for name in batch.kept.column_names if name in table.column_names]
    if taken:
        raise DataError(
            f"keep: {taken[0]!r} is also a column of the predictions; rename it in the input"
        )
    kept = batch.kept.slice(begin, len(table))
    for i, name in enumerate(kept.column_names):
        table = table.add_column(i, kept.schema.field(name), kept[name])
    return table


def _describe_no_room(order: Order, facts: DeviceFacts, failure: str) -> str:
    limit = "" if order.limit_mib is None else f" within the limit of {order.limit_mib:g} MiB"
    remedy = "free memory there" if order.limit_mib is None else "raise limit_mib"
    return (
        f"memory: {facts.name} has no room{limit} for {failure}; {remedy}, or choose another device"
    )
