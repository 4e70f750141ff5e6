"""What is taken for a secret, by its name or by what is around it, and what is not: an example for
each row of the two tables."""

import re
from typing import Any

import pytest

from headroom.base import secret_names, secret_texts
from headroom.base.secret_names import (
    PLAIN_NAMES,
    SECRET_NAMES,
    is_secret,
    make_variable_name,
    restore_secrets,
)
from headroom.base.secret_texts import TEXT_RULES, find_secrets, hide_in_text, hide_secrets

LETTERS = "Zq4vN8xT1bW6kR3mY9cF5hJ2pL7sD0gA"
NAMES = {
    "a password": ("PASSWORD", "db.userPasswd", "ROOT_PASSWORD_2", "passphrase"),
    "a short word for one": ("DBPW", "ROOT_PW", "dbPw", "SSHPASS", "MYSQL_PWD", "pw"),
    "a secret": ("client_secret", "SECRETS"),
    "a token": ("hub_token", "TOKEN", "api_tokens"),
    "a key": ("AWS_SECRET_ACCESS_KEY", "accountKey", "apikey", "api_keys"),
    "what has a login in it": ("STORAGE_CONNECTION_STRING", "DSN"),
    "credentials": ("credentials", "db.credential"),
    "a header": ("Authorization", "SESSION_COOKIE", "set-cookie", "jwt"),
    "a session": ("JSESSIONID", "x.phpsessid"),
    "an address that lets in": ("TEAMS_WEBHOOK_URL", "webhook"),
    "which of several": ("SECRET_KEY_BASE", "MY_SECRET_VALUE", "token_prod", "API_KEY_PRIMARY"),
    "what for": ("TOKEN_FOR_X", "PASSWORD_OF_ANN", "api_key_for_db"),
    "the second of a pair": ("data.args.auth.1", "http_auth.1"),
}
NO_SECRETS = {
    "a public key": ("SSH_PUBLIC_KEY",),
    "a token of a vocabulary": ("pad_token", "model.args.mask_token", "num_token", "next_token"),
    "a word that ends so": ("COMPASS", "bypass", "surpass"),
    "one of several rounds, or a filter": ("forward_pass", "lowpass", "num_pass", "firstPass"),
}
OTHER_NAMES = (
    *("tokens", "max_tokens", "num_tokens", "tokenizer", "token_ids", "token_length", "token_type"),
    *(
        "pass_rate",
        "passed",
        "passes",
        "passenger",
        "password_field",
        "password_column",
        "secretary",
    ),
    *(
        "secret_santa",
        "use_password_file",
        "keys",
        "key",
        "monkey",
        "sort_key",
        "author",
        "authors",
    ),
    *(
        "cookiecutter",
        "npw_ratio",
        "session_length",
        "auth",
        "bearing",
        "credentials_file",
        "OLDPWD",
    ),
)
TEXTS: dict[str, tuple[str, ...]] = {
    "a private key": ("-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----",),
    "the password of a URI": ("postgresql://ann:{}@db/x", "redis://:{}@h"),
    "an unquoted password of a URI": ("mysql://ann:a {} b@db/x",),
    "a token as the user of a URI": ("https://{}@git.example.com/x.git",),
    "a query": ("https://api.example.com/rows?n=3&token={}&m=1", "/x?sig={}"),
    "a webhook": ("https://hooks.slack.com/services/{}",),
    "cookies": ("Cookie: a={}; b=1", "{{'Set-Cookie': 'a=1; b={}'}}"),
    "a header": ("X-Api-Key: {}", '\\"Authorization\\": \\"Bearer {}\\"'),
    "a bearer": ("sent with Bearer {}",),
    "nothing but a bearer": ("Bearer {}", " bearer {} "),
    "nothing but a login": ("Basic {}=", "Token {}"),
    "a name and its value": (
        *("password={}", "DBPW = '{}'", '{{"password": "{}"}}', "db_pw => '{}'", "PASSWORD={}"),
        *('{{"a": "{{\\"password\\": \\"{}\\"}}"}}', "{{b'password': b'{}'}}", "password='{}"),
    ),
    "a flag": ("python -m x --db.password {}", "--root-pw {}"),
    "a block of YAML": ("password: |\n  {}\n  and more\nuser: ann",),
    "a line of YAML": ("db:\n  user: ann\n  password: correct {} horse\n  port: 5432",),
    "a password right after a colon": ("ann with password:{}",),
    "a name, a colon and its value": ("it failed, password: {} (code 1)", "DBPW: {}, user: ann"),
    "what a setting got": ("data.args.token: must be a number (got '{}')",),
    "a password in quotes": ("wrong password '{}' for ann",),
    "an element of XML": (
        "<password>{}</password>",
        "<db:password a='b'><![CDATA[{}]]></db:password>",
    ),
    "an entry with a name and a value": (
        "{{'name': 'DB_PASSWORD', 'value': '{}'}}",
        "- name: DB_PASSWORD\n  value: {}",
        '<add key="DbPassword" value="{}"/>',
    ),
    "a pair": ("[('user', 'ann'), ('password', '{}')]",),
    "a pair in JSON": ('[["password", "{}1"]]',),
    "a line of netrc": (
        "machine h login ann password {}",
        "machine h\n  login ann\n  password {}",
    ),
    "a line of pgpass": ("db.example.com:5432:app:ann:{}", "*:*:*:ann:{}"),
    "the user of a web client": (
        *("curl -u ann:{} https://h", "curl -sSuann:{} h", "wget --proxy-user=ann:{} h"),
    ),
    "the user of another one": ("http -a ann:{} GET h",),
    "the user of a web client, in a list": ("['/usr/bin/x', '-u', 'ann:{}']",),
    "an option of one letter": ("mysqldump -u root -p{} db", "-u ann -p{}", "sshpass -p{} ssh h"),
    "an option and its value": ("sshpass -p {} ssh h", "docker login -u ann -p {} h"),
    "an option of another letter": ("redis-cli -h h -a {} ping", "ldapsearch -x -w {}"),
    "a token of a known service": (
        *(
            f"{start}{{}}{LETTERS}"
            for start in ("ghp_", "glpat-", "hf_", "sk-proj-", "npm_", "AIza")
        ),
        f"eyJ{LETTERS}.eyJ{LETTERS}.{{}}",
    ),
}
ORDINARY = (
    *("tokens: 512", "max_tokens=512 num_tokens: 1000000", "tokenizer: bert-base-uncased"),
    *("pass_rate: 0.93", "password_field: true", "bypass: proxy", "compass: north"),
    *("secretary: ann smith", "author: X", "key: value", "id 123e4567-e89b-12d3-a456-426614174000"),
    *("commit 3f2b9c1d8e7a6b5c4d3e2f1a0b9c8d7e6f5a4b3c", "fingerprint 41be7a33b1c0799f"),
    *("/data/token/train.npy", "data/tokens_2024/secret/x.csv", "data.path: my_token_dir/f.npz"),
    *("unexpected token: ')' at 3", "Unexpected token: foo", "loss per token: abc"),
    *("file.py:1234:func:name:msg", "a.py:12:34:error: x", "2026-11-25 15:47:37:123"),
    *("password: must be set", "token: is missing", "the secret: there is none"),
    *("forward_pass: 3.2 ms", "mask_token: [MASK]", "next_token: cat", "('token', 'label')"),
    *("columns: ['token', 'label', 'secret']", "docker run -u 1000:1000 x", "mkdir -p a:b"),
    *("cuda:0: 00000000:01:00.0", "http://127.0.0.1:4200/api", "registry:5000/team/image:tag"),
    *("https://x/y?key=plain&n=3", "python -m flows.train --run.key night --optim.lr 0.1"),
    *("the token stream goes on", "bearer of news", "basic block", "token classification"),
    *("100%25 of a%20path", "epoch 3/10  loss 0.412  1.9 s  peak 6.1 GiB", "<b>token</b>"),
    *("mysql -u root -h host db", "sort_key: customer", "run.key: nightly-2026 is being trained"),
    *("model.args.token: unknown; did you mean tokens?", "http 1.1 -a b:c", "password: str"),
)


def _match_alone(pattern: str, name: str) -> bool:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    words = re.sub(r"[^a-z0-9]+", "_", words)
    both = words, re.sub(r"(_\d+)+$", "", words)
    return any(re.search(f"({pattern})$", one) for one in both)


def test_each_row_of_the_tables_has_an_example() -> None:
    assert [*NAMES] == [*SECRET_NAMES] and [*NO_SECRETS] == [*PLAIN_NAMES]
    assert {*TEXTS} == {*TEXT_RULES}


@pytest.mark.parametrize(("row", "name"), [(r, n) for r, names in NAMES.items() for n in names])
def test_names_of_secrets(row: str, name: str) -> None:
    """DBPW, SSHPASS, SECRET_KEY_BASE, TOKEN_FOR_X and their like were kept and shown."""
    assert _match_alone(SECRET_NAMES[row], name)
    assert is_secret(name, "abcde") and not is_secret(name, "512") and not is_secret(name, "true")


@pytest.mark.parametrize(
    ("row", "name"), [(r, n) for r, names in NO_SECRETS.items() for n in names]
)
def test_names_that_only_sound_like_it(row: str, name: str) -> None:
    assert _match_alone(PLAIN_NAMES[row], name) and not is_secret(name, "abcde")


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_ordinary_names_are_none_of_a_secret(name: str) -> None:
    assert not is_secret(name, "abcde") and not is_secret(f"model.args.{name}", "abcde")


@pytest.mark.parametrize(
    ("row", "text"), [(r, text) for r, texts in TEXTS.items() for text in texts]
)
def test_secrets_in_texts(row: str, text: str) -> None:
    """`password: X`, YAML, netrc, pgpass, curl -u, -pX, XML, pairs and JSON in JSON stayed."""
    secret = "Zq4vN8xT1bW6" if TEXT_RULES[row].is_random else "Hunter"
    said = text.format(secret)
    found = [said[begin:end] for begin, end in secret_texts._find_spans(row, said)]
    assert found and secret in found[0] and len(found) == 1
    assert any(hint in said.lower() for hint in TEXT_RULES[row].hints)
    shown = hide_in_text(said)
    assert secret not in shown and "***" in shown and hide_in_text(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        *("password%3DHunter", "%7B%22password%22%3A%20%22Hunter%22%7D", "password%253DHunter"),
        *("next=postgresql%3A%2F%2Fann%3AHunter%40db and more", "a+b%26token%3DHunter"),
    ],
)
def test_secrets_that_are_quoted_for_a_uri(text: str) -> None:
    assert "Hunter" not in hide_in_text(text) and "***" in hide_in_text(text)


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_texts_stay(text: str) -> None:
    assert hide_in_text(text) == text


def test_a_short_password_of_the_environment_is_hidden_as_a_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of five letters stood in every error; but what each run says is no secret to hide."""
    monkeypatch.setenv("DBPW", "hunte")
    monkeypatch.setenv("ROOT_PW", "train")
    monkeypatch.setenv("POSTGRES_PASSWORD", "postgres")
    monkeypatch.setenv("PIN_SECRET", "123456")
    text = "no hunte, hunter, train, postgresql and 123456: 'hunte'"
    assert hide_in_text(text) == text.replace("hunte,", "***,").replace("'hunte'", "'***'")


VALUES: dict[str, Any] = {
    "url": "postgresql://ann:Hunter@db/x",
    "deep": [{"password": "Hunter", "n": 3}, {"keys": [f"ghp_{LETTERS}"]}],
    "header": "Bearer Hunter",
    "credentials": {"user": "ann", "what": "Hunter"},
    "auth": ["ann", "Hunter"],
    "pin_secret": 987654321,
    "tokens": 512,
    "note": "visible",
}
HIDDEN = {
    "url": "postgresql://ann:***@db/x",
    "deep": [{"password": "***", "n": 3}, {"keys": ["***"]}],
    "header": "Bearer ***",
    "credentials": {"user": "ann", "what": "***"},
    "auth": ["ann", "***"],
    "pin_secret": "*** (a number)",
    "tokens": 512,
    "note": "visible",
}


def test_values_of_settings_are_hidden_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A login inside a value was kept, as only names were looked at; once it was hidden, it was
    given to the user's loader with its stars."""
    assert hide_secrets(VALUES, "data.args") == HIDDEN
    assert hide_secrets(HIDDEN, "data.args") == HIDDEN
    found = find_secrets(VALUES, "data.args")
    missing: list[str] = []
    restore_secrets(HIDDEN, "data.args", missing)
    assert missing == [*found] and "data.args.url" in found
    for name, value in found.items():
        monkeypatch.setenv(make_variable_name(name), value)
    assert restore_secrets(HIDDEN, "data.args", []) == VALUES


def test_a_name_among_the_values_that_is_a_secret_is_asked_for_again() -> None:
    hidden = hide_secrets({f"ghp_{LETTERS}": 1}, "data.args")
    missing: list[str] = []
    assert hidden == {"***": 1} and restore_secrets(hidden, "data.args", missing) == hidden
    assert missing == ["data.args.***"]


def test_stars_of_another_kind_are_no_secret() -> None:
    assert not secret_names.is_hidden("****") and secret_names.is_hidden("a ***")
