"""What is hidden of a text, and what is left of it."""

import io
import sys

import pytest

from tasks.process.redaction import link, redact_output, redacted, redacted_errors, without_secrets


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("postgresql://ann:s3cr:et@db/x", "postgresql://ann:***@db/x"),
        (
            "no http://:pw@h and mysql+pymysql://u:p%40@h:1/d",
            "no http://:***@h and mysql+pymysql://u:***@h:1/d",
        ),
        ("http://u:a/b@h", "http://u:***@h"),  # a slash should have been written %2F
        ("sqlite:////tmp/a.db", "sqlite:////tmp/a.db"),
        ("https://t0kenoflogin@host/x", "https://***@host/x"),
        ("GET /x?a=1&access_token=s3cret&b=2", "GET /x?a=1&access_token=***&b=2"),
        ("{'Authorization': 'Basic YW5uOnMzY3JldA=='}", "{'Authorization': 'Basic ***'}"),
        ("authorization: bearer s3cret", "authorization: bearer ***"),
    ],
)
def test_passwords_are_hidden(text: str, kept: str) -> None:
    assert redacted(text) == kept


def test_secrets_of_the_environment_are_hidden_by_their_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "first-s3cret")
    monkeypatch.setenv("DB_PASSWORD", "first-s3cret-and-more")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://ann:third-s3cret@host")
    monkeypatch.setenv("SHORT_TOKEN", "step")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "no-secret-at-all")
    text = "step first-s3cret first-s3cret-and-more third-s3cret no-secret-at-all"
    assert redacted(text) == "step *** *** *** no-secret-at-all"


def test_a_record_keeps_its_shape_without_its_secrets() -> None:
    run = {"tags": {"a": "http://u:s3cret@h"}, "rows": [1, None, ("x://u:s3cret@h",)]}
    assert without_secrets(run) == {
        "tags": {"a": "http://u:***@h"},
        "rows": [1, None, ["x://u:***@h"]],
    }


def test_a_link_asks_for_the_login_itself() -> None:
    assert link("https://ann:s3cret@host/api#/runs/1") == "https://host/api#/runs/1"


def test_an_error_and_its_causes_are_raised_without_secrets() -> None:
    with pytest.raises(ValueError, match="^no x://u:[*]{3}@h$") as caught, redacted_errors():
        try:
            raise KeyError("x://u:s3cret@h")
        except KeyError as error:
            raise ValueError("no x://u:s3cret@h") from error
    assert "s3cret" not in str(caught.value.__cause__)


@pytest.mark.parametrize("is_log", [False, True])
def test_a_log_on_a_full_disk_is_no_reason_to_end(
    monkeypatch: pytest.MonkeyPatch, is_log: bool
) -> None:
    with open("/dev/full", "wb", buffering=0) as raw:
        monkeypatch.setattr(sys, "stdout", None)  # closed
        monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(raw, write_through=True))
        redact_output(is_log=is_log)
        if is_log:
            print("lost", file=sys.stderr)
        else:
            with pytest.raises(OSError, match="No space left"):
                print("lost", file=sys.stderr)
