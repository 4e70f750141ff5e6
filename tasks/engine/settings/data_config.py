"""What the data of a run is: where it comes from, what is learnt from it, how it is prepared. It
refuses settings that have no meaning for their source.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from tasks.engine.base.field_types import (
    Bool,
    Float,
    Int,
    Section,
    Text,
    is_import,
    known_or_imported,
)

TABLE_FILES = ("csv", "tsv", "parquet")
FILE_SOURCES = (*TABLE_FILES, "npz", "npy", "safetensors", "images")
TOKEN_SOURCES = ("text", "tokens")
UNORDERED = ("digits", "images", "synthetic")  # rows as they lie say nothing of time
SOURCES = ("digits", *FILE_SOURCES, "synthetic", *TOKEN_SOURCES)
SPLIT = ("test_fraction", "split", "split_column")
# The sources that look at a setting.
TAKEN_BY: dict[str, tuple[str, ...]] = {
    "drop": TABLE_FILES,
    "missing": TABLE_FILES,
    "na": TABLE_FILES,
    "decimal": ("csv", "tsv"),
    "split_column": TABLE_FILES,
    "image_size": ("images",),
    "rows": ("synthetic",),
    "features": ("synthetic",),
    "classes": ("synthetic",),
    "context": TOKEN_SOURCES,
    "vocab": ("tokens",),
}
ENDINGS = {
    **{f".{name}": name for name in ("csv", "tsv", "parquet", "npz", "npy", "safetensors")},
    ".tab": "tsv",
    ".pq": "parquet",
    ".txt": "text",
    ".bin": "tokens",
}


class DataConfig(Section):
    source: Text = "digits"
    """digits: 1,797 real handwritten digits that ship with scikit-learn, unless data.path is given,
    whose ending then decides; csv, tsv, parquet, npz, npy, safetensors: the file at data.path, of
    parquet also a folder of them; images: a folder with a folder of images for each class;
    synthetic: made-up rows, for benchmarks; text: the bytes of any file; tokens: numbers in an npy
    file, or 16-bit ones in a bin file; package.module:factory: your own, see data.args."""
    path: Text | None = None
    """The file or folder to read. Default of text: the licence and the documentation that come with
    Python."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of your own source: the factory is called with them."""
    target: Text | None = None
    """The column (csv, tsv, parquet) or array (npz, safetensors) to predict. Default: the one named
    target, label, class or y. An npy file holds it in its last column."""
    drop: list[Text] = Field(default_factory=list)
    """Columns of csv, tsv and parquet to leave out."""
    missing: Literal["fail", "drop", "mean"] = "fail"
    """Rows with missing features, of csv, tsv and parquet. fail: refuse them; drop: leave them out;
    mean: take the mean of the training rows, and for text the category `missing`."""
    na: list[Text] | None = None
    """Words that mean missing in csv, tsv and parquet, beside the empty cell; also numbers, in
    quotes: ["-999"]. Default: NA, N/A, NULL, NaN and the like in csv and tsv, none in parquet."""
    decimal: Literal[".", ","] = "."
    """The decimal mark of numbers in csv and tsv."""
    task: Literal["auto", "classification", "multilabel", "regression", "tokens"] = "auto"
    """What to learn. auto: the next token of the sources text and tokens; else classification
    where the target is text, boolean or whole numbers with at most 100 different values, multilabel
    where it has several columns of 0 and 1, else regression."""
    image_size: Annotated[Int, Field(ge=4, le=4096)] = 64
    """Pixels of a side to which the source images resizes the square in the middle of each."""
    memory_mib: Annotated[Float, Field(ge=64, le=2**30)] | None = None
    """Host memory that the data may take, in MiB, while it is prepared and on a CPU while it is
    trained on, where rows beyond half of it are read from disk. Default: what is free."""
    validation_fraction: Annotated[Float, Field(gt=0, lt=1)] = 0.2
    """Share of the rows kept for validation; stratified by class. Of tokens: the last ones."""
    test_fraction: Annotated[Float, Field(ge=0, lt=1)] = 0.0
    """Share of the rows that are put aside and judged once, at the end, by the weights that are
    logged: test/ metrics. Nothing else ever looks at them. Not of data sets and loaders."""
    split: Literal["random", "time", "group"] = "random"
    """How rows come into the parts. random: drawn, of each class the same share; time: the latest
    are for validation, and of these the very latest for the test, by data.split_column or else in
    the order of the rows; group: rows that are alike in data.split_column are in one part. Tokens
    are always split by their order. Not of data sets and loaders."""
    split_column: Text | None = None
    """The column of csv, tsv and parquet to split by time or by group. It is no feature."""
    split_seed: Annotated[Int, Field(ge=0, lt=2**32)] = 0
    """Seed of the split. Apart from train.seed, so that runs with other seeds stay comparable."""
    scale: Bool = True
    """Standardize each feature with mean and deviation of the training rows (images: of all their
    pixels together). Tokens stay as they are."""
    scale_target: Bool = True
    """Standardize the target of a regression, each of its columns, with mean and deviation of the
    training rows. Predictions, val/mae, val/rmse, and what a loss and metrics of your own are given
    are in its units all the same; a model of your own learns the standardized one, so false where
    its outputs are bounded (a softplus at the end). Data sets and loaders stay as they are."""
    target_transform: Literal["auto", "none", "log"] = "auto"
    """What is learnt of a regression's target. log: log(1 + target / unit), where the unit is the
    median of the training rows above 0; for targets from 0 on. auto: log for one target that is
    skewed to the right, where boosted trees on a sample of the rows make smaller errors on the
    validation rows with it (mean absolute times root mean squared error, in the target's units);
    else, and where data.scale_target is false, none. All figures and predictions stay in the
    target's units; val/loss is that of what is learnt."""
    rows: Annotated[Int, Field(ge=10, le=10**9)] = 10_000
    """Rows of the synthetic source."""
    features: Annotated[Int, Field(ge=1, le=10**6)] = 64
    """Features of the synthetic source."""
    classes: Annotated[Int, Field(ge=1, le=10**5)] = 10
    """Classes of the synthetic source; 1 makes a regression."""
    context: Annotated[Int, Field(ge=1, le=2**20)] = 128
    """Tokens that one row of the sources text and tokens holds: as far as the model looks back."""
    vocab: Annotated[Int, Field(ge=2, le=2**16)] | None = None
    """Different tokens of the source tokens. Default: the largest in the file plus 1; give it where
    the file may lack some, such as 50257 for GPT-2's."""
    cache: Annotated[Text, Field(min_length=1)] = ".headroom/data"
    """Folder for prepared arrays, reused by runs with the same data and settings."""

    @model_validator(mode="before")
    @classmethod
    def _source_by_ending(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("source", "digits") != "digits":
            return values
        path = values.get("path")
        if not isinstance(path, str) or not path:
            return values
        return {**values, "source": ENDINGS.get(PurePath(path).suffix.lower(), "digits")}

    @field_validator("source")
    @classmethod
    def _known_source(cls, name: str) -> str:
        return known_or_imported(name, SOURCES)

    @property
    def own_split(self) -> dict[str, Any]:
        """The settings of SPLIT that are not at their defaults."""
        given = {name: getattr(self, name) for name in SPLIT}
        return {n: v for n, v in given.items() if v != type(self).model_fields[n].default}

    @model_validator(mode="after")
    def _path_fits_source(self) -> DataConfig:
        takes = (*FILE_SOURCES, *TOKEN_SOURCES)
        has_default = self.source == "text" and self.path is None
        if self.source in takes and not self.path and not has_default:
            raise ValueError(f"path: is needed for source {self.source}; name the file to read")
        if self.source == "digits" and self.path:
            raise ValueError(
                f"source: the ending of {self.path[:200]!r} does not tell; set data.source to one "
                f"of {', '.join(takes)}"
            )
        if self.source not in takes and self.path is not None:
            raise ValueError(
                f"path: has no meaning for source {self.source} (got {self.path!r}); "
                f"set data.source to one of {', '.join(takes)}"
            )
        for name, text in (("path", self.path or ""), ("cache", self.cache)):
            if "\0" in text:
                raise ValueError(f"{name}: must not hold a NUL character")
        return self

    @model_validator(mode="after")
    def _settings_fit_source(self) -> DataConfig:
        if self.args and not is_import(self.source):
            raise ValueError(
                f"args: are for a source of your own, package.module:factory (got {self.source}); "
                "drop them"
            )
        # The others have no effect, and are told.
        for name in ("drop", "missing", "na", "decimal", "split_column"):
            takes, default = (
                TAKEN_BY[name],
                type(self).model_fields[name].get_default(call_default_factory=True),
            )
            if getattr(self, name) != default and self.source not in takes:
                raise ValueError(
                    f"{name}: has no meaning for source {self.source}; drop it, or set data.source "
                    f"to one of {', '.join(takes)}"
                )
        return self

    @model_validator(mode="after")
    def _split_fits_source(self) -> DataConfig:
        if self.validation_fraction + self.test_fraction >= 1:
            raise ValueError(
                f"test_fraction: {self.test_fraction:g} and data.validation_fraction "
                f"{self.validation_fraction:g} leave no row to train on; lower one"
            )
        if self.split == "group" and self.source not in TABLE_FILES:
            raise ValueError(
                f"split: group needs a column of {', '.join(TABLE_FILES)} (the source is "
                f"{self.source}); set it to random or time"
            )
        if self.split == "group" and self.split_column is None:
            raise ValueError("split_column: is needed by data.split group; name a column")
        if self.split == "random" and self.split_column is not None:
            raise ValueError(
                f"split_column: is for data.split time and group (got {self.split_column!r} and "
                "random); set data.split to one of them, or drop it"
            )
        if self.split == "time" and self.source in UNORDERED:
            raise ValueError(
                f"split: time needs rows that have an order (the source is {self.source}); set it "
                "to random"
            )
        return self

    @model_validator(mode="after")
    def _task_fits_source(self) -> DataConfig:
        if self.source in TOKEN_SOURCES and self.task not in ("auto", "tokens"):
            raise ValueError(
                f"task: must be auto or tokens for source {self.source} (got {self.task}); drop it"
            )
        own = is_import(self.source)
        if self.source not in TOKEN_SOURCES and self.task == "tokens" and not own:
            raise ValueError(
                f"task: tokens needs source {' or '.join(TOKEN_SOURCES)} (got {self.source}); "
                "change one of them"
            )
        return self
