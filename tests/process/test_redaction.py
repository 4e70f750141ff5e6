"""What is hidden of a text, and what is left of it."""

import io
import logging
import random
import string
import sys

import pytest

from headroom.process.redaction import (
    redact,
    redact_command_line,
    redact_errors,
    redact_logs,
    redact_nested,
    redact_output,
    remove_login,
)

_DRAWN = random.Random(7)
_HEX = "0123456789abcdef"


def _drawn(count: int, letters: str = string.ascii_letters + string.digits) -> str:
    return "".join(_DRAWN.choices(letters, k=count))


# Secrets of known services, as their owners hold them: the variable, then the value.
VARIABLES = {
    "AWS_SECRET_ACCESS_KEY": _drawn(40),
    "AWS_SESSION_TOKEN": _drawn(120),
    "AZURE_CLIENT_SECRET": _drawn(34),
    "AZURE_STORAGE_KEY": _drawn(86) + "==",
    "AZURE_STORAGE_CONNECTION_STRING": f"AccountName=ann;AccountKey={_drawn(86)}==;Suffix=core",
    "AZURE_DEVOPS_EXT_PAT": _drawn(52).lower(),
    "GITHUB_PAT": _drawn(40),
    "CI_JOB_TOKEN": _drawn(20),
    "SENTRY_DSN": f"https://{_drawn(32, _HEX)}@o1.ingest.example.com/1",
    "DATABASE_DSN": f"host=db user=ann password={_drawn(16)} dbname=x",
    "SLACK_WEBHOOK": f"https://chat.example.com/{_drawn(24)}",
    "TEAMS_WEBHOOK_URL": f"https://teams.example.com/{_drawn(24)}",
    "KAFKA_SASL_JAAS_CONFIG": f'PlainLoginModule required username="a" password="{_drawn(20)}";',
    "MYSQL_PWD": "correct horse",
    "PGPASSWORD": "s3cret 'quoted\"",
    "RABBITMQ_DEFAULT_PASS": "correcthorse",
    "WANDB_API_KEY": _drawn(40, _HEX),
    "COMET_APIKEY": _drawn(25),
    "KAGGLE_KEY": _drawn(32, _HEX),
    "FERNET_KEY": _drawn(43) + "=",
    "STRIPE_KEY": _drawn(28),
    "DATADOG_KEY": f"{_drawn(8, _HEX)}-{_drawn(4, _HEX)}-{_drawn(12, _HEX)}",
    "DJANGO_SECRET_KEY": "django-insecure-" + _drawn(30, string.ascii_lowercase + "#$&()"),
    "DEPLOY_PRIVATE_KEY": f"-----BEGIN X PRIVATE KEY-----\n{_drawn(64)}\n{_drawn(50)}\n-----END",
    "GPG_PASSPHRASE": "hunter2hunter2",
    "VAULT_TOKEN": _drawn(26) + "\n",
    "TWILIO_AUTH_TOKEN": _drawn(32, _HEX),
    "SNOWFLAKE_PASSWORD": "Passw0rd+and more",
    "MONGO_URI": "mongodb+srv://ann:p%40ss%20w0rd%2Fx@cluster/x",
    "REDIS_URL": "redis://:two words'n@cache:6379/0",
    "CELERY_BROKER": f"amqp://ann:{_drawn(18)}@mq//",
    "OPENAI_API_KEY_2": _drawn(48),
}
# How an error tells of one: the text, and the secret in it.
TEXTS = [
    (text.format(secret), secret)
    for text, secret in (
        ("postgresql://ann:{}@db/x", "p@ss" + _drawn(8)),
        ("mysql://ann:{}@db/x", "my pass phrase"),
        ("mssql+pyodbc://sa:{}@db:1433/x", 'qu"ote d'),
        ("https://{}@git.example.com/x.git", _drawn(30)),
        ("https://{}:x-oauth-basic@git.example.com", "ghp_" + _drawn(36)),
        ("ftp://ann:{}@[::1]/x", _drawn(12)),
        ("GET https://api.example.com/x?a=1&api_key={}", _drawn(20)),
        ("GET /x?access_key={}&b=2", _drawn(20)),
        ("GET /x?X-Amz-Signature={}", _drawn(64, _HEX)),
        ("https://a.blob.example.net/x?sv=1&sig={}", _drawn(40)),
        ("X-Api-Key: {}", _drawn(24)),
        ("{{'x-api-key': '{}'}}", _drawn(24)),
        ("Authorization: Bearer {}", _drawn(40)),
        ("Proxy-Authorization: Basic {}", _drawn(24) + "=="),
        ("PRIVATE-TOKEN: {}", _drawn(20)),
        ("Ocp-Apim-Subscription-Key: {}", _drawn(32, _HEX)),
        ("Cookie: session={}", _drawn(32)),
        ("login(user='ann', password='{}')", "correct horse"),
        ("host=db password={} dbname=x", _drawn(12)),
        ("Server=db;Uid=ann;Pwd={};", _drawn(12)),
        ("AccountKey={};EndpointSuffix=core", _drawn(40) + "=="),
        ('{{"client_secret": "{}"}}', _drawn(32)),
        ("https://hooks.slack.com/services/{}", f"T{_drawn(8)}/B{_drawn(8)}/{_drawn(24)}"),
        ("key {} was refused", "sk-proj-" + _drawn(48)),
        ("{} has expired", "hf_" + _drawn(34)),
        ("{} has expired", "glpat-" + _drawn(20)),
        ("jwt {}", f"eyJ{_drawn(20)}.eyJ{_drawn(40)}.{_drawn(43)}"),
        ("python -m x --db.password {}", "correct-horse"),
    )
]
ORDINARY = {
    "PATH": "/usr/local/bin:/usr/bin",
    "HOME": "/home/ann",
    "PWD": "/home/ann/was-here-and-is-gone",
    "OLDPWD": "/home/ann/project",
    "KEYBOARD": "us-international",
    "MONKEY": "chimpanzee-and-gorilla",
    "SSH_AUTH_SOCK": "/run/user/1000/ssh-agent.socket",
    "XAUTHORITY": "/home/ann/.Xauthority-file",
    "TOKENIZERS_PARALLELISM": "false-by-default",
    "SORT_KEY": "customer_region_name",
    "PARTITION_KEY": "customer_region_2024",
    "PRIMARY_KEY": "user_account_id_v2",
    "S3_KEY": "datasets/mnist/train-images.npz",
    "REGISTRY_KEY": "HKEY_LOCAL_MACHINE/Software/Model",
    "SSH_KEY": "/home/ann/.ssh/id_ed25519",
    "ED_PUBLIC_KEY": "AAAAC3NzaC1lZDI1NTE5AAAAI",
    "CACHE_KEY": "CustomerRegionTable",
    "AUTHOR": "ann-of-green-gables",
    "DB_AUTH": "scram-sha-256-plus",
    "PGPASSFILE": "/home/ann/.pgpass-of-mine",
    "GOOGLE_APPLICATION_CREDENTIALS": sys.executable,
    "AWS_SHARED_CREDENTIALS_FILE": "/home/ann/.aws/credentials",
    "AWS_DEFAULT_REGION": "eu-central-1-local",
    "PAD_TOKEN": "<|endoftext|>",
    "MASK_TOKEN": "[MASK-of-words]",
    "TOKEN_LENGTH": "0000000512",
    "MAX_TOKENS": "1000000000",
    "COMPASS": "north-by-northwest",
    "BYPASS": "proxy.example.com",
    "SECRETARY": "ann-from-accounting",
    "PATTERN": "*.parquet-of-2024",
    "CUDA_VISIBLE_DEVICES": "GPU-3f2b9c1d-8e7a-4b6c",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "MLFLOW_TRACKING_URI": "http://127.0.0.1:5000/team@prod",
    "HTTP_PROXY": "http://proxy.example.com:3128",
    "LS_COLORS": "rs=0:di=01;34:ln=01;36",
    "LANG": "en_GB.UTF-8-modified",
    "TERM_SESSION_ID": "w0t0p0:3F2B9C1D",
    "HEADROOM_LEASES": "/run/lock/headroom-leases",
    "OMP_NUM_THREADS": "00000001",
    "KEYS": "alpha-beta-gamma",
    "USE_AUTH": "false",
}


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
    assert redact(text) == kept


def test_secrets_of_the_environment_are_hidden_by_their_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "first-s3cret")
    monkeypatch.setenv("DB_PASSWORD", "first-s3cret-and-more")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://ann:third-s3cret@host")
    monkeypatch.setenv("SHORT_TOKEN", "step")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "no-secret-at-all")
    text = "step first-s3cret first-s3cret-and-more third-s3cret no-secret-at-all"
    assert redact(text) == "step *** *** *** no-secret-at-all"


def test_a_record_keeps_its_shape_without_its_secrets() -> None:
    run = {"tags": {"a": "http://u:s3cret@h"}, "rows": [1, None, ("x://u:s3cret@h",)]}
    assert redact_nested(run) == {
        "tags": {"a": "http://u:***@h"},
        "rows": [1, None, ["x://u:***@h"]],
    }


def test_a_link_asks_for_the_login_itself() -> None:
    assert remove_login("https://ann:s3cret@host/api#/runs/1") == "https://host/api#/runs/1"


def test_an_error_and_its_causes_are_raised_without_secrets() -> None:
    with pytest.raises(ValueError, match="^no x://u:[*]{3}@h$") as caught, redact_errors():
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


@pytest.mark.parametrize("name", VARIABLES)
def test_secrets_of_known_services_are_hidden_wherever_they_stand(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also as they are told by others: decoded, quoted, without the end of their line."""
    value = VARIABLES[name]
    monkeypatch.setenv(name, value)
    assert value.strip() not in redact(f"it was {value}!")
    if name == "MONGO_URI":
        assert redact("wrong password 'p@ss w0rd/x'") == "wrong password '***'"
    elif "://" not in value:
        assert value.strip() not in redact(f"it was {value.strip()}!")
        assert repr(value.strip())[1:-1] not in redact(repr({"it was": value}))
    for line in value.split("\n") if "PRIVATE" in value else ():
        assert line.startswith("-----BEGIN") or len(line) < 20 or line not in redact(line)


@pytest.mark.parametrize(("text", "secret"), TEXTS, ids=[text[:30] for text, _ in TEXTS])
def test_secrets_are_hidden_that_no_variable_holds(text: str, secret: str) -> None:
    shown = redact(f"it failed: {text} (code 1)")
    assert secret not in shown and "***" in shown
    assert shown.startswith("it failed: ") and shown.endswith(" (code 1)"), shown


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_variables_are_not_hidden(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, ORDINARY[name])
    text = f"{name}={ORDINARY[name]} and {ORDINARY[name]}"
    assert redact(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "data.args.password: must be a string (got 1)",
        "model.args.api_key: is unknown; the model mlp takes hidden, dropout",
        "see http://localhost:5000/x and mail ann@example.com",
        "http://[::1]:5000/api is up; ann@example.com",
        "max_token=512, pad_token='<pad>', loss per token: 2.31, token=None",
        "val/accuracy=0.9833 key=images sort_key=name run.key=nightly-2026",
        "sk-learn-contrib-extensions and task-force-of-the-week",
        "author: ann, secretary: bob; the secret: there is none",
        "python -m flows.train --optim.lr 0.1 --run.key night --model.name mlp",
    ],
)
def test_ordinary_texts_stay_as_they_are(text: str) -> None:
    assert redact(text) == text


def test_a_flag_s_secret_is_hidden_as_a_word_of_its_own() -> None:
    words = ["--data.args.password", "correct horse", "--model.args.api_key=abc", "--optim.lr", "1"]
    shown = ["--data.args.password", "***", "--model.args.api_key=***", "--optim.lr", "1"]
    assert redact_command_line(words) == shown


def test_control_characters_are_told_as_escapes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception's text could clear the terminal, or write its title."""
    odd = "a\x1b]0;title\x07 \x00 \x9b2J\tb\r\nc\rd"
    assert redact(odd) == r"a\x1b]0;title\x07 \x00 \x9b2J" + "\tb\r\nc" + r"\x0dd"
    with pytest.raises(OSError, match=r"no \\x1b\[2J") as caught, redact_errors():
        error = OSError(5, "no \x1b[2J", "/\x00")
        error.add_note("x\x1by")
        raise error
    assert caught.value.__notes__ == [r"x\x1by"]
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    redact_output()
    print("\r\x1b[32m50 %\x1b[0m \x1b]0;title\x07\x00")  # a progress line, and no more
    assert screen.getvalue() == "\r\x1b[32m50 %\x1b[0m " + r"\x1b]0;title\x07\x00" + "\n"


def test_log_lines_are_redacted_whoever_handles_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Prefect's own handler sent them to its server, past what is printed."""
    monkeypatch.setenv("STORE_TOKEN", "pq7marker-token")
    factory = logging.getLogRecordFactory()
    try:
        redact_logs()
        redact_logs()
        logging.getLogger("headroom.x").warning("with %s \x1b", "pq7marker-token")
        logging.getLogger("headroom.x").warning("100 %")
    finally:
        logging.setLogRecordFactory(factory)
    assert caplog.messages == [r"with *** \x1b", "100 %"]


def test_the_key_of_a_view_in_an_address_is_no_secret() -> None:
    """A filter of secrets took it for one."""
    path = "/#/compare-runs?runs=b7707186d6be4382&viewStateShareKey=of-b7707186&more=1"
    assert redact(path) == path
