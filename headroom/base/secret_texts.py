"""Hide secrets by what is around them: in texts of any kind and in the values of settings. The
rules are a table, of which each is compiled when a text has its hint: ordinary lines cost next to
nothing. Ordinary words, numbers and paths are never taken for secrets.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import quote, quote_plus, unquote, unquote_plus

from headroom.base.secret_names import (
    HIDDEN,
    HIDDEN_NUMBER,
    is_hidden,
    is_random_text,
    is_secret,
    map_values,
)

MIN_SECRET_LETTERS = 5  # characters of a secret to look for wherever it stands
MIN_LINE_LETTERS = 20  # and of a line of a secret with several, such as a private key
_SHORT_LETTERS, _WORD_LETTERS = 8, 12  # below these it stands apart from letters beside it
# Short words that every run says: to hide them would hide nothing, and make all of it unreadable.
_SAID = (
    *(
        "adamw",
        "admin",
        "batch",
        "cosine",
        "debug",
        "default",
        "device",
        "digits",
        "epoch",
        "epochs",
    ),
    *("error", "finished", "headroom", "hidden", "linear", "local", "memory", "metric", "mlflow"),
    *("model", "models", "postgres", "prefect", "python", "seconds", "start", "state", "steps"),
    *("synthetic", "target", "token", "tokens", "train", "trained", "training", "validation"),
    *("value", "values"),
)


class Rule(NamedTuple):
    """How a secret is written. hints: one of them is in each such text, in lower case, and one of
    `signs`. pattern: its group `secret` is one where its group `name`, if any, is the name of one.
    is_told: the name may also begin a sentence. is_random: it looks like random letters."""

    hints: tuple[str, ...]
    pattern: str
    signs: tuple[str, ...] = ("",)
    is_told: bool = False
    is_random: bool = False


_NO_PORT = r"(?!\d+(?:[/?#\s\"',;)]|$))"
_LOGIN = re.compile(rf"\w://[^\s:/@\[]*:{_NO_PORT}([^\s\"']*)@")
_LONE_LOGIN = re.compile(rf"\w://[^\s:/@\[]*:{_NO_PORT}(.*)@", re.DOTALL)  # of a text with one URI
# What a part of every name of a secret is; see secret_names.
_STEMS = (
    *("pass", "pw", "secret", "token", "key", "credential", "auth", "bearer", "jwt", "cookie"),
    *(
        "dsn",
        "conn",
        "jaas",
        "sess",
        "webhook",
        "notify",
        "_pat",
        "-pat",
        ".pat",
        "_sas",
        "-sas",
        ".sas",
    ),
)
_NAME = r"(?P<name>(?=[A-Za-z_])[\w.-]{2,})"
_QUOTE = r"\\*[\"']"
# In quotes, which JSON in JSON escapes, to the same ones or the end of the line; else a word.
_VALUE = (
    rf"(?:b(?=[\"']))?(?P<q>{_QUOTE})?(?P<secret>(?(q)(?:(?!(?P=q))(?:\\[^\n]|[^\n]))*"
    r"|[^\s,;&)}\]\"'\\<>][^\s,;&)}\]\"']*))"
)
_QUOTED = rf"b?(?P<q>{_QUOTE})(?P<secret>(?:(?!(?P=q))(?:\\[^\n]|[^\n]))+)(?P=q)"
# A parser tells of a token, which is none to hide.
_ADJECTIVES = ("unexpected", "unknown", "invalid", "bad", "special", "per", "next", "each", "last")
_NO_PARSER = "".join(f"(?<!{word} )(?<!{word.capitalize()} )" for word in _ADJECTIVES)
TEXT_RULES: dict[str, Rule] = {
    "a private key": Rule(
        ("private key",),
        r"(?s:-----BEGIN [A-Z ]*PRIVATE KEY-----(?P<secret>.*?)(?=-----END|\Z))",
    ),
    "the password of a URI": Rule(("://",), rf"\w://[^\s:/@\[]*:{_NO_PORT}(?P<secret>[^\s\"']*)@"),
    # With a space or a quote in it, which should have been written %20 or %22.
    "an unquoted password of a URI": Rule(
        ("://",),
        rf"\w://[^\s:/@\[\"']*:{_NO_PORT}(?!\*\*\*@)(?P<secret>[^\s@/][^@\n]{{0,80}})@(?=[\w.\[])",
    ),
    "a token as the user of a URI": Rule(("http",), r"https?://(?P<secret>[^\s:/@\"']+)@"),
    "a query": Rule(
        ("?", "&"),
        r"(?i:[?&](?:[\w.-]*(?:passw(?:or)?d|token|secret|signature|credential)|sig|auth)=)"
        r"(?P<secret>[^&\s\"']+)",
    ),
    "cookies": Rule(
        ("cookie",),
        r"(?<!\w)(?i:(?:set-)?cookie)(?:\\*[\"'])?\s*[:=,]\s*(?:\\*[\"'])?"
        r"(?P<secret>[\w.-]+=[^\s;,\"'\\]+(?:;\s*[\w.-]+=[^\s;,\"'\\]+)*)",
    ),
    "a header": Rule(
        ("authorization", "api-key", "apikey", "-token", "-key", "-auth", "-secret", "cookie"),
        r"(?i:(?:[\w-]*authorization|x-[\w-]*(?:key|token|auth|secret)|[\w-]*api-?key"
        r"|private-token|[\w-]+-(?:api|access|subscription|auth)-(?:key|token)|(?:set-)?cookie)"
        r"(?:\\*[\"'])?\s*[:=,]\s*(?:\\*[\"'])?"
        r"(?:(?:basic|bearer|token|apikey|digest|negotiate)\s+)?)(?P<secret>[^\s\"',)}\\]+)",
    ),
    "a webhook": Rule(
        ("hook", "telegram", "chat.google"),
        r"(?:hooks\.slack\.com/(?:services|workflows|triggers)/|discord(?:app)?\.com/api/webhooks/"
        r"|\.webhook\.office\.com/|api\.telegram\.org/bot|chat\.googleapis\.com/v1/spaces/)"
        r"(?P<secret>[^\s\"'<>]+)",
    ),
    "a bearer": Rule(
        ("bearer",),
        r"(?:\bBearer\s+(?!(?:[Aa]uth|[Tt]oken|[Ss]cheme|[Hh]eader))|(?i:\bbearer)\s+(?=[^\s=]*[\d=]))"
        r"(?P<secret>[\w.~+/-]{5,}=*)",
        is_told=True,
    ),
    "nothing but a bearer": Rule(("bearer",), r"\A\s*(?i:bearer)\s+(?P<secret>\S+)\s*\Z"),
    "nothing but a login": Rule(
        ("basic", "token", "apikey", "digest"),
        r"\A\s*(?i:basic|token|apikey|digest)\s+(?P<secret>\S+)\s*\Z",
        is_random=True,
    ),
    # NAME=value and "name": "value"; also in JSON in JSON.
    "a name and its value": Rule(
        _STEMS,
        rf"(?:(?<=--)|(?<![\w.-])){_NO_PARSER}{_NAME}(?:(?:{_QUOTE})?\s?=>?\s?|{_QUOTE}\s*:\s*)"
        + _VALUE,
        signs=("=", ":"),
    ),
    "a flag": Rule(_STEMS, rf"--{_NAME}\s(?P<secret>[^\s\"'-][^\s\"']*)", signs=("--",)),
    "a block of YAML": Rule(
        _STEMS,
        rf"(?m:^(?P<indent>[ \t]*)(?:- )?){_NAME}:[ \t]*[|>][-+\d]*[ \t]*\n"
        r"(?P<secret>(?P=indent)[ \t]+\S.*(?:\n(?P=indent)[ \t]+\S.*)*)",
        signs=(": |", ": >", ":|", ":>"),
    ),
    "a line of YAML": Rule(
        _STEMS,
        rf"(?m:^[ \t]*(?:- )?)(?:{_QUOTE})?(?P<name>[A-Za-z_][\w-]+)(?:{_QUOTE})?[ \t]*:[ \t]+"
        rf"(?P<q>{_QUOTE})?"
        r"(?P<secret>(?(q)(?:(?!(?P=q))(?:\\[^\n]|[^\n]))*|(?:[^\s,;#][^\n,;]*)))",
        is_told=True,
        signs=(": ", ":\t"),
    ),
    "a password right after a colon": Rule(
        ("pass", "pwd"),
        r"(?<![\w.:/-])(?i:(?:\w+_)?(?:password|passwd|passphrase|pwd)):(?!\d+\b)"
        r"(?P<secret>[^\s:,;&)}\]\"'\\]+)",
        signs=(":",),
    ),
    "a name, a colon and its value": Rule(
        _STEMS,
        rf"(?<![\w.-]){_NO_PARSER}{_NAME}[ \t]?:[ \t]+{_VALUE}",
        is_told=True,
        signs=(": ", ":\t"),
    ),
    "what a setting got": Rule(
        ("(got ",),
        rf"(?<![\w.-]){_NAME}: [^\n]*?\(got (?P<q>[\"'])?(?P<secret>(?(q).*?(?=(?P=q)\))|[^\s)]+))",
    ),
    "a password in quotes": Rule(
        ("pass",),
        r"(?i:pass(?:word|wd|phrase)?)\s+(?:is\s+)?(?P<q>[\"'`])(?P<secret>[^\n]+?)(?P=q)",
        signs=("'", '"', "`"),
    ),
    "an element of XML": Rule(
        ("</",),
        r"<(?:[\w-]+:)?(?P<name>[\w.-]{2,})(?:\s[^<>]*)?>\s*(?:<!\[CDATA\[)?(?P<secret>[^<>\]]+)",
    ),
    "an entry with a name and a value": Rule(
        ("value",),
        rf"\b(?:name|key)(?:{_QUOTE})?\s*[=:]\s*(?:{_QUOTE})?{_NAME}(?:{_QUOTE})?[\s,]+"
        rf"(?:{_QUOTE})?value(?:{_QUOTE})?\s*[=:]\s*" + _VALUE,
    ),
    "a pair": Rule(
        _STEMS, rf"\(\s*b?{_QUOTE}(?!token\b){_NAME}{_QUOTE}\s*,\s*{_QUOTED}\s*\)", signs=("(",)
    ),
    "a pair in JSON": Rule(
        _STEMS,
        rf"[(\[]\s*{_QUOTE}{_NAME}{_QUOTE}\s*,\s*(?=[^\]\d]*\d){_QUOTED}\s*[)\]]",
        signs=("[", "("),
    ),
    "a line of netrc": Rule(
        ("login",),
        r"\blogin\s+\S+\s+(?:account\s+\S+\s+)?password\s+(?P<secret>[^\s\"',)]+)",
        signs=("password",),
    ),
    "a line of pgpass": Rule(
        (":543", ":643", ":*:"),
        r"(?m:^|(?<![\w:./-])(?=localhost:|\*:|[\w-]+\.[\w.-]+:))"
        r"(?!\S*\.(?:py|pyx|c|cc|cpp|h|cu|js|ts|go|rs|java|log|txt|csv|ya?ml|json):)"
        r"[\w.*-]+:(?:[56]43\d|\*):(?!\d+:)[\w*.-]+:[\w@.-]+:(?!/)(?P<secret>[^\s\"',;)]+)",
    ),
    "the user of a web client": Rule(
        ("curl", "wget", "xh", "lftp", "smbclient"),
        r"\b(?:curl|wget|xh|lftp|smbclient)\b[^\n|;]*?[\s\"'](?:-[a-zA-Z]*[uU]|--(?:proxy-)?user)"
        r"(?:[\s=,\"']+|(?<=[uU]))[^\s:\"'@/%-][^\s:\"'@/%]*[:%](?!//)(?P<secret>[^\s\"']+)",
        signs=("-",),
    ),
    "the user of another one": Rule(
        ("-a", "--auth"),
        r"\b(?:https?|xh)(?:\s+-[\w-]+)*\s+(?:-a|--auth)[\s=]+[^\s:]+:(?P<secret>[^\s\"']+)",
    ),
    "the user of a web client, in a list": Rule(
        ("-u", "--user"),
        r"[\"'](?:-u|--user|--proxy-user)[\"'],\s*[\"'][^\s:\"'@/]+:(?P<secret>[^\s\"']+)",
    ),
    "an option of one letter": Rule(
        ("-p",),
        r"(?:\b(?:mysql\w*|mariadb[\w-]*|sshpass|plink|7z[arz]?)\b[^\n|;]*?[\s\"']"
        r"|(?:^|[\s\"'])-u[\s\"',]*[\w.@-]+[\s\"',]+)-p(?P<secret>[^\s\"'-][^\s\"']*)",
    ),
    "an option and its value": Rule(
        ("-p",),
        r"\b(?:sshpass|mongo\w*|(?:docker|podman|helm|az|oc)\b[^\n|;]*?\blogin)\b[^\n|;]*?[\s\"']-p"
        r"[\s\"',=]+(?P<secret>[^\s\"'-][^\s\"']*)",
        signs=("pass", "mongo", "login"),
    ),
    "an option of another letter": Rule(
        ("redis-cli", "ldap", "zip"),
        r"\b(?:redis-cli\b[^\n|;]*?[\s\"']-a|ldap\w+\b[^\n|;]*?[\s\"']-w|zip\b[^\n|;]*?[\s\"']-P)"
        r"[\s\"',=]*(?P<secret>[^\s\"'-][^\s\"']*)",
        signs=("-",),
    ),
    # GitHub, GitLab, Slack, Stripe, OpenAI and its like, Hugging Face, Google, npm, PyPI, Docker,
    # Vault, Databricks, SendGrid, DigitalOcean, Linear, Notion, Atlassian, Shopify, Grafana,
    # Sentry, Doppler, Groq, Replicate, age; JSON web tokens.
    "a token of a known service": Rule(
        (
            *(
                "ghp_",
                "gho_",
                "ghu_",
                "ghs_",
                "ghr_",
                "github_pat_",
                "glpat",
                "glrt",
                "gldt",
                "glptt",
            ),
            *("glcbt", "glsa", "xox", "xapp-", "sk-", "k_live_", "k_test_", "hf_", "aiza"),
            *("ya29.", "gocspx-", "npm_", "pypi-", "dckr_pat_", "hvs.", "hvb.", "dapi", "sg."),
            *("_v1_", "lin_api_", "secret_", "ntn_", "atatt", "shp", "whsec_", "nvapi-", "tskey-"),
            *("eyj", "sntrys_", "dp.", "gsk_", "r8_", "xai-", "age-secret-key-"),
        ),
        r"\b(?P<secret>(?:gh[pousr]_|github_pat_|gl(?:pat|rt|dt|ptt|cbt|sa)[-_]|xox[abeprs]-|xapp-"
        r"|sk-|[rsp]k_(?:live|test)_|hf_|AIza|ya29\.|GOCSPX-|npm_|pypi-|dckr_pat_|hv[sb]\.|dapi|SG\."
        r"|do[opr]_v1_|lin_api_|secret_|ntn_|ATATT|shp[ap]+_|whsec_|nvapi-|tskey-|sntrys_|dp\.[ps]t\."
        r"|gsk_|r8_|xai-|AGE-SECRET-KEY-|eyJ[\w-]{8,}\.eyJ)[\w.~+/-]{12,}=*)",
        is_random=True,
    ),
}
# With which a sentence goes on about a secret: "password: must be a text".
_SENTENCE = (
    r"(?i:(must|should|shall|is|isn't|was|were|are|has|have|had|may|can|can't|cannot|could|will|would"
    r"|does|did|do|don't|there|this|that|these|the|a|an|not|no|none|nothing|never|missing|required"
    r"|invalid|incorrect|wrong|bad|field|expected|got|given|give|unknown|unexpected|please|needs?"
    r"|needed|empty|too|at|in|for|of|from|to|by|with|as|on|and|or|it|its|if|str|string|text|int"
    r"|integer|float|bool|boolean|number|any|input|value|holds?|takes?|read|see|use|used|drop)"
    r"(?![\w'-]))"
)
_SIGNS = ("basic", "bearer", "digest", "negotiate", "apikey", *"|>{[(", "|-", ">-", "|+", ">+")
_PERCENT = re.compile(r"[\w.~+*-]*%[0-9A-Fa-f]{2}[\w.~+*%-]*")


def hide_in_text(text: str) -> str:
    """Return the text with three stars in place of each secret in it."""
    text = _hide_by_rules(text)
    if "%" in text:
        text = _PERCENT.sub(_hide_in_quoted, text)
    secrets = _compile_secrets(tuple(os.environ.items()))
    return secrets.sub(HIDDEN, text) if secrets is not None else text


def _hide_by_rules(text: str) -> str:
    lower = text.lower()
    for name, rule in TEXT_RULES.items():
        if not _may_have(rule, lower):
            continue
        parts, at = [], 0
        for begin, end in _find_spans(name, text):
            parts += [text[at:begin], HIDDEN]
            at = end
        if parts:
            text = "".join([*parts, text[at:]])
            lower = text.lower()
    return text


def _hide_in_quoted(match: re.Match[str]) -> str:
    """Return a text that is quoted for a URI, once or twice, without the secrets in it."""
    plain = unquote(match[0])
    shown = _hide_by_rules(plain)
    if shown == plain and "%" in plain:
        shown = _PERCENT.sub(_hide_in_quoted, plain)
    return match[0] if shown == plain else quote(shown, safe="*")


def find_in_text(text: str) -> set[str]:
    """Return the secrets that are found in a text by what is around them."""
    lower, secrets = text.lower(), set()
    for name, rule in TEXT_RULES.items():
        if _may_have(rule, lower):
            secrets |= {text[begin:end] for begin, end in _find_spans(name, text)}
    return secrets


def _may_have(rule: Rule, lower: str) -> bool:
    return any(hint in lower for hint in rule.hints) and any(sign in lower for sign in rule.signs)


def _find_spans(rule_name: str, text: str) -> Iterator[tuple[int, int]]:
    rule, pattern, at = TEXT_RULES[rule_name], _compile_rule(rule_name), 0
    while (match := pattern.search(text, at)) is not None:
        if _is_one(rule, match):
            yield match.span("secret")
            at = max(match.end("secret"), at + 1)
        else:  # what stands for its value may be the name of the next
            at = max(match.start("secret"), at + 1)


def _is_one(rule: Rule, match: re.Match[str]) -> bool:
    """Return whether a match of this rule is a secret, and not hidden by a rule before."""
    groups = match.groupdict()
    secret, name = match["secret"], groups.get("name")
    if name is not None and not (
        not is_hidden(secret) and secret.lower() not in _SIGNS and is_secret(name, secret)
    ):
        return False
    if rule.is_told and groups.get("q") is None and re.match(_SENTENCE, secret):
        return False
    return not rule.is_random or is_random_text(secret)


@lru_cache(None)
def _compile_rule(name: str) -> re.Pattern[str]:
    return re.compile(TEXT_RULES[name].pattern)


@lru_cache(1)
def _compile_secrets(environment: tuple[tuple[str, str], ...]) -> re.Pattern[str] | None:
    """Return a pattern of all secrets in the environment, in each way to write them.

    None where there are none. The longest come first: one may be a part of another.
    """
    secrets: set[str] = set()
    for name, text in environment:
        value = text.strip()
        if is_secret(name, value):
            secrets |= {
                value,
                *(line for line in value.split("\n") if len(line.strip()) >= MIN_LINE_LETTERS),
            }
        secrets.update((_LONE_LOGIN if value.count("://") == 1 else _LOGIN).findall(value))
        secrets |= find_in_text(value)
    secrets |= {decode(one) for one in secrets for decode in (unquote, unquote_plus)}
    secrets |= {
        written
        for one in secrets
        for written in (
            quote(one, safe=""),
            quote_plus(one),
            repr(one)[1:-1],
            json.dumps(one)[1:-1],
        )
    }
    texts = sorted(filter(_may_look_for, {one.strip() for one in secrets}), key=len, reverse=True)
    return re.compile("|".join(map(_make_search, texts))) if texts else None


def _may_look_for(secret: str) -> bool:
    if len(secret) < MIN_SECRET_LETTERS or secret.lower() in _SAID:
        return False
    return len(secret) >= _SHORT_LETTERS or not secret.isdigit()  # a figure may be the same


def _make_search(secret: str) -> str:
    """Return the pattern that finds it: a short one, or a word, not within another word."""
    is_word = secret.isalpha() and len(secret) < _WORD_LETTERS
    if len(secret) >= _SHORT_LETTERS and not is_word:
        return re.escape(secret)
    beside = "[A-Za-z]" if is_word else "[A-Za-z0-9]"
    return f"(?<!{beside}){re.escape(secret)}(?!{beside})"


def hide_secrets(value: Any, setting: str, *, by_name: bool = True) -> Any:
    """Return the value of a setting such as model.args, with stars for the secrets in it: for the
    whole of a value by its name, else for what in it is one."""

    def star(name: str, value: Any) -> Any:
        if value == HIDDEN_NUMBER:
            return value
        if by_name and _may_hide(value) and is_secret(name, str(value)):
            return HIDDEN if isinstance(value, str) else HIDDEN_NUMBER
        return hide_in_text(value) if isinstance(value, str) else value

    return _hide_names(map_values(value, setting, star))


def _hide_names(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            hide_in_text(key) if isinstance(key, str) else key: _hide_names(one)
            for key, one in value.items()
        }
    return type(value)(map(_hide_names, value)) if isinstance(value, (list, tuple)) else value


def find_secrets(value: Any, setting: str, *, by_name: bool = True) -> dict[str, str]:
    """Return what `hide_secrets` would hide, or a part of, by the dotted names."""
    secrets: dict[str, str] = {}

    def keep(name: str, value: Any) -> Any:
        if _may_hide(value) and not is_hidden(value):
            is_one = by_name and is_secret(name, str(value))
            if is_one or (isinstance(value, str) and hide_in_text(value) != value):
                secrets[name] = str(value)
        return value

    map_values(value, setting, keep)
    return secrets


def _may_hide(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool))
