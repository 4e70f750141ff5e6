"""Reads where results go: mlflow.yaml, and the environment over it. It refuses a URI that
would lose them; for who must not be refused, they go to a folder of the user's instead.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headroom.process.command import make_own_folder
from headroom.process.redaction import redact
from headroom.settings.read_settings import SettingsProblem, parse_value, read_file_text

SCHEMES = ("sqlite", "postgresql", "mysql", "mssql", "http", "https", "databricks")
EXPERIMENT_LETTERS = 250  # of a name, at most
# Of an SQLite address, what SQLAlchemy and SQLite read behind the file's name.
_OPTIONS = re.compile(r"\?((?:\w+=[^/?&]*&?)*)$")


class TrackingError(ValueError):
    """Results can't be kept where they should go; the text starts with the setting at fault."""


class TrackingSettings(BaseModel):
    """The settings of mlflow.yaml with the environment over it, and paths made absolute."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tracking_uri: str = "sqlite:///mlflow.db"
    artifacts: str = "mlartifacts"
    experiment: str = Field("headroom", min_length=1, max_length=EXPERIMENT_LETTERS)
    runs: str = ".headroom/runs"
    required: bool = False
    flush_s: float = Field(2, gt=0, le=3600)
    give_up_s: float = Field(60, gt=0, le=3600)
    send_later_s: float = Field(86400, ge=0, le=30 * 86400)
    keep_runs: int = Field(200, ge=0)
    keep_days: float = Field(0, ge=0, le=36500)

    @property
    def database(self) -> Path | None:
        """Return the SQLite file that the runs are kept in.

        None where they are kept elsewhere.
        """
        if not self.tracking_uri.startswith("sqlite"):
            return None
        return _parse_sqlite_address(self.tracking_uri.partition(":///")[2])[0]

    @property
    def is_sql(self) -> bool:
        """Return whether the runs are in a database server, in which MLflow makes tables.

        Others may use that database at once.
        """
        return self.tracking_uri.startswith(("postgresql", "mysql", "mssql"))

    @property
    def keeps_files(self) -> bool:
        """Return whether the artifacts are files here: a tracking server has its own place."""
        return not self.tracking_uri.startswith(("http", "databricks"))


def read_tracking_settings() -> TrackingSettings:
    """Read mlflow.yaml of the working directory, else beside `tasks` where that is below it, else
    the defaults.

    The environment's MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME win over it. Raises
    TrackingError for a file or a URI that can't be used.
    """
    file = next((f for f in _list_candidates() if f.is_file()), None)
    settings = _read_file(file) if file else {}
    base = file.parent if file else Path.cwd()
    environment = {
        "tracking_uri": os.environ.get("MLFLOW_TRACKING_URI"),
        "experiment": os.environ.get("MLFLOW_EXPERIMENT_NAME"),
    }
    if len(environment["experiment"] or "") > EXPERIMENT_LETTERS:
        raise TrackingError(
            f"MLFLOW_EXPERIMENT_NAME: must be at most {EXPERIMENT_LETTERS} characters "
            f"(got {len(environment['experiment'] or ''):,})"
        )
    chosen = _validate(settings).model_copy(update={k: v for k, v in environment.items() if v})
    # A path in the file belongs to the file's folder, one in the environment to the caller's.
    uri_base = Path.cwd() if environment["tracking_uri"] else base
    return chosen.model_copy(
        update={
            "tracking_uri": _make_absolute(chosen.tracking_uri, uri_base),
            "artifacts": str((base / chosen.artifacts).absolute()),
            "runs": str((base / chosen.runs).absolute()),
        }
    )


@dataclass(frozen=True)
class FoundSettings:
    """Where results go, and what a person should know of it."""

    settings: TrackingSettings
    doubt: str = ""


def find_tracking_settings() -> FoundSettings:
    """Return the settings for a training that must begin in any case: where it can't be kept as
    they say, it is kept in a folder of the user's state."""
    settings = _validate({})
    try:
        settings = read_tracking_settings()
        problem = _find_problem(settings)
    except (TrackingError, OSError) as refused:
        problem = str(refused)
        settings = settings.model_copy(update={"tracking_uri": "sqlite:///mlflow.db"})
    if not problem:
        return FoundSettings(settings)
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    base = Path(state) / "headroom"
    own = _keep_in(base, settings)
    if _find_problem(own):
        base = make_own_folder("headroom")  # in a folder where any user may make one of that name
        own = _keep_in(base, settings)
    return FoundSettings(own, f"{problem}; this run is kept in {base}")


def _keep_in(base: Path, settings: TrackingSettings) -> TrackingSettings:
    """Return the settings with all that is kept here in that folder."""
    own = settings.model_copy(update={"runs": str(base / "runs")})
    if not own.keeps_files:
        return own
    uri = _make_absolute("sqlite:///mlflow.db", base)
    return own.model_copy(update={"tracking_uri": uri, "artifacts": str(base / "artifacts")})


def _find_problem(settings: TrackingSettings) -> str:
    """Return why runs could not be kept there; empty where they can."""
    places = [Path(settings.runs)]
    if settings.database is not None:
        places.append(settings.database.parent)
        if settings.database.exists() and not os.access(settings.database, os.W_OK):
            return f"tracking_uri: {settings.database} can't be written"
    for place in places:
        with suppress(OSError):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(place, os.W_OK | os.X_OK) or not place.is_dir():
            return f"runs: {place} can't be written"
    return ""


def _list_candidates() -> list[Path]:
    """Return where the file may be. That of an installed checkout is for who works within it."""
    project = Path(__file__).parent.parent.parent
    here = Path.cwd()
    candidates = [here / "mlflow.yaml"]
    return [*candidates, project / "mlflow.yaml"] if here.is_relative_to(project) else candidates


def _read_file(file: Path) -> dict[str, object]:
    try:
        settings = parse_value(read_file_text(str(file)))
    except SettingsProblem as refused:
        raise TrackingError(f"mlflow.yaml:{refused.line or ''} {refused.text}") from None
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise TrackingError("mlflow.yaml: must hold settings as `name: value`, one a line")
    return settings


def _validate(settings: dict[str, object]) -> TrackingSettings:
    try:
        return TrackingSettings.model_validate(settings)
    except ValidationError as error:
        lines = [
            f"mlflow.yaml {'.'.join(map(str, e['loc']))}: {e['msg']} (got {e['input']!r})"
            for e in error.errors(include_url=False)
        ]
        raise TrackingError(redact("\n".join(lines))) from None


def _make_absolute(uri: str, base: Path) -> str:
    if uri == "databricks":  # MLflow knows the way
        return uri
    scheme, _, rest = uri.partition("://")
    name = scheme.partition("+")[0]
    if not rest or name not in SCHEMES:
        raise TrackingError(
            f"tracking_uri: must be one of {', '.join(s + '://' for s in SCHEMES)} "
            f"(got {redact(uri)!r}); MLflow no longer writes to plain folders"
        )
    if name == "sqlite":
        path, options = _parse_sqlite_address(rest.removeprefix("/"))
        if str(path) in (".", ":memory:"):
            raise TrackingError(
                f"tracking_uri: {uri!r} is in memory and gone at exit; name a file: sqlite:///mlflow.db"
            )
        return make_sqlite_uri(scheme, (base / path).absolute(), options)
    if name in ("http", "https") and not _has_host(uri):
        raise TrackingError(f"tracking_uri: must name a host (got {redact(uri)!r})")
    return uri


def _parse_sqlite_address(address: str) -> tuple[Path, str]:
    """Return the file that an SQLite address names, and its options; see make_sqlite_uri."""
    match = _OPTIONS.search(address)
    path, options = (address[: match.start()], match[1]) if match else (address, "")
    if path.startswith("file:") and "uri=true" in options.split("&"):
        return Path(unquote(path.removeprefix("file:"))), options
    return Path(path), options


def make_sqlite_uri(scheme: str, path: Path, options: str) -> str:
    """Return the address of a file.

    SQLAlchemy takes all of a name as it is written, but for a `?`: that only SQLite itself can
    read, as %3F.
    """
    others = "&".join(o for o in options.split("&") if o and o != "uri=true")
    if "?" not in str(path):
        return f"{scheme}:///{path}{'?' if others else ''}{others}"
    # With its driver's name: for `sqlite:///file:` MLflow makes a folder of that name.
    options = "&".join(filter(None, ("uri=true", others)))
    return f"sqlite+pysqlite:///file:{quote(str(path))}?{options}"


def _has_host(uri: str) -> bool:
    try:
        parts = urlsplit(uri)
        return bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False
