"""The image and compose.yaml: what can be told of them without a Docker engine, and, where their
passwords meet what they open, PostgreSQL and the S3 store themselves."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from sqlalchemy import make_url

from tests.conftest import free_port
from tests.team import fill_environment, find_postgres_programs, run_postgres

ROOT = Path(__file__).parent.parent
COMPOSE = YAML(typ="safe").load(ROOT / "compose.yaml")
SERVICES = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if name != "postgres"}
WORKERS = [service for name, service in SERVICES.items() if name.startswith("worker")]
# Of the Dockerfile its instructions, in order: COPY, RUN, ... and what follows.
LAYERS = [
    (word, rest)
    for line in re.sub(r"\\\n", "", re.sub(r"(?m)^#.*\n", "", (ROOT / "Dockerfile").read_text()))
    .strip()
    .splitlines()
    for word, _, rest in [line.partition(" ")]
]
COPIED = [
    (i, name) for i, (w, rest) in enumerate(LAYERS) if w == "COPY" for name in rest.split()[:-1]
]
INSTALLS, LISTS = (
    i for i, (word, rest) in enumerate(LAYERS) if word == "RUN" and "pins/install.py" in rest
)
SECRET = """@:/#%?'" $HOME${x} \\b`id`&=+,;|<>()[]{}*~!^\u00fc end"""


def test_the_image_is_made_of_files_that_are_sent_to_it() -> None:
    copied = {name for _, name in COPIED}
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!{name}" for name in copied} == {line for line in sent if line.startswith("!")}
    assert all((ROOT / name).exists() for name in copied)
    assert "mlflow.yaml" not in copied, "results would lie in the image"


def test_new_sources_bring_no_library_anew(tmp_path: Path) -> None:
    """Each change of a source downloaded gigabytes. The very command of the Dockerfile, with a pip
    that installs nothing but the project, finds all that it needs in what is copied before it."""
    for i, name in COPIED:
        if i < INSTALLS:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, tmp_path / name)
    assert {file.name for file in tmp_path.iterdir()} == {"pyproject.toml", "pins"}
    assert {"headroom", "flows", "tasks", "pins"} == {n for _, n in COPIED if (ROOT / n).is_dir()}
    (tmp_path / "bin").mkdir()
    calls = tmp_path / "calls"
    python = tmp_path / "bin" / "python"
    python.write_text(PIP_ONLY_READS.format(python=sys.executable, calls=calls))
    python.chmod(0o755)
    pins = OURS["mlflow"]["build"]["args"]["PINS"]
    env = {**os.environ, "PINS": pins, "PATH": f"{python.parent}:{os.environ['PATH']}"}
    command = ["sh", "-c", LAYERS[INSTALLS][1]]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Would install headroom" in done.stdout
    read = {Path(name).stem for name in re.findall(r"--requirement (\S+)", calls.read_text())}
    assert read == set(pins.split()), "PyTorch is here"
    assert not [rest for word, rest in LAYERS[LISTS + 1 :] if "pip" in rest or "pins" in rest]


# A Python whose `sys.executable` is itself. Its pip reads requirements and installs none of them.
PIP_ONLY_READS = """#!/bin/sh
if test "$1" != -m; then
  exec {python} -c 'import runpy, sys
sys.executable, sys.argv = sys.argv[1], sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")' "$0" "$@"
fi
echo "$@" >> {calls}
case "$*" in
*--editable*) shift 4; exec {python} -m pip install --dry-run "$@" ;;
esac
"""


def test_the_image_is_not_root_and_may_write_where_it_has_to() -> None:
    """A named volume gets owner and mode of the image's folder; without one it is root's."""
    users = [rest for word, rest in LAYERS if word == "USER"]
    assert users[-1].isdigit() and int(users[-1]) > 0, "Kubernetes takes a number"
    (makes,) = (rest for word, rest in LAYERS if rest.startswith("useradd"))
    assert f"--uid {users[-1]} " in makes and "--mode 1777" in makes
    made = {word for word in makes.partition("install ")[2].split() if word.startswith("/")}
    env = dict(pair.split("=") for word, rest in LAYERS if word == "ENV" for pair in rest.split())
    assert env["HOME"] in made and env["USER"]
    assert {rest for word, rest in LAYERS if word == "VOLUME"} <= made
    for name, service in OURS.items():
        mounts = [volume.rpartition("}")[2].split(":") for volume in service.get("volumes", [])]
        assert {mount[1] for mount in mounts if mount[2:] != ["ro"]} <= made, name
    for worker in WORKERS:
        told = worker["environment"]
        assert {told["HEADROOM_LEASES"], told["HEADROOM_HOST_FOLDER"]} <= made


def test_the_image_has_what_its_deployments_need() -> None:
    """`train-team` clones, and there was no git."""
    deployments = YAML(typ="safe").load(ROOT / "prefect-team.yaml")["deployments"]
    names = {deployment["name"] for deployment in deployments}
    (deployed,) = re.findall(r"--name (\S+)", SERVICES["deploy"]["entrypoint"][-1])
    assert {deployed, "train-team"} == names
    assert "prefect-team.yaml" in {name for _, name in COPIED}
    assert ("WORKDIR", SERVICES["deploy"]["working_dir"]) in LAYERS
    assert any(rest.startswith("apt-get") and " git " in rest for _, rest in LAYERS)
    of_worker = set(re.findall(r"{{ \$(\w+) }}\"\s+# of the worker", _text("prefect-team.yaml")))
    assert of_worker == {"HEADROOM_HOST_FOLDER"}
    assert all(of_worker <= worker["environment"].keys() for worker in WORKERS)


def test_loaders_in_a_container_get_shared_memory() -> None:
    """64 MiB, Docker's own, end loaders with workers and NCCL."""
    assert [worker["shm_size"] for worker in WORKERS] == ["8gb", "8gb"]
    assert all(service["init"] for service in OURS.values())
    for text in (_text("Dockerfile"), _text("docs/team.md")):
        for command in re.findall(r"docker run (?:\\\n|.)*", text):
            trains = "--entrypoint" not in command
            assert {"--init", *["--shm-size"][:trains]} <= set(command.split()), command


def test_workers_of_one_machine_take_turns_and_have_their_journals_apart() -> None:
    mounted = [
        dict(v.rpartition(":")[::2] for v in w["volumes"] if v[-3:] != ":ro") for w in WORKERS
    ]
    (one, other) = ({at: name for name, at in of.items()} for of in mounted)
    assert one["/leases"] == other["/leases"]
    assert one["/headroom/.headroom"] != other["/headroom/.headroom"]


def test_compose_has_what_it_names() -> None:
    for service in SERVICES.values():
        assert service.get("depends_on", {}).keys() <= SERVICES.keys()
        volumes = {volume.partition(":")[0] for volume in service.get("volumes", [])}
        assert {name for name in volumes if "$" not in name} <= COMPOSE["volumes"].keys()
    arguments = {name for service in OURS.values() for name in service["build"]["args"]}
    assert arguments == {rest.partition("=")[0] for word, rest in LAYERS if word == "ARG"}
    told = SERVICES["mlflow"]["environment"].keys() | SERVICES["prefect"]["environment"].keys()
    stores = {"MLFLOW_BACKEND_STORE_URI", "PREFECT_SERVER_DATABASE_CONNECTION_URL"}
    assert told >= stores | {"MLFLOW_ARTIFACTS_DESTINATION"}


def test_compose_takes_its_passwords_from_the_environment_and_refuses_without() -> None:
    text = _text("compose.yaml")
    named = set(re.findall(r"\$\{(\w*PASSWORD)", text))
    assert named == {"POSTGRES_PASSWORD", "S3_PASSWORD"}
    assert set(re.findall(r"\$\{(\w+):\?", text)) == named
    for service in SERVICES.values():
        for name, value in service.get("environment", {}).items():
            if re.search("PASSWORD|SECRET", name):
                assert value.startswith("${")
            else:
                assert "PASSWORD" not in value, (
                    "pasted into a URI it had to be of letters and digits"
                )


def test_a_password_of_any_characters_opens_the_databases_of_compose() -> None:
    """Only letters and digits did: it was pasted into URIs as it is."""
    pytest.importorskip("psycopg2", reason="headroom[team] is not installed")
    if find_postgres_programs() is None:
        pytest.skip("PostgreSQL is not installed")
    with run_postgres(SECRET) as postgres:
        for name, variable in (
            ("mlflow", "MLFLOW_BACKEND_STORE_URI"),
            ("prefect", "PREFECT_SERVER_DATABASE_CONNECTION_URL"),
        ):
            told = fill_environment(name, POSTGRES_PASSWORD=SECRET)
            url = make_url(told[variable])
            assert url.password is None and url.database == name
            here = url.set(host="127.0.0.1", port=postgres.port).render_as_string(
                hide_password=False
            )
            assert _connects(here, {"PGPASSWORD": told["PGPASSWORD"]}) == ""
            assert "password" in _connects(here, {"PGPASSWORD": "another"})


def test_a_password_of_any_characters_opens_the_store_of_compose(tmp_path: Path) -> None:
    boto3 = pytest.importorskip("boto3", reason="headroom[team] is not installed")
    pytest.importorskip("nanio", reason="headroom[team] is not installed")
    port, s3 = free_port(), fill_environment("s3", S3_PASSWORD=SECRET)
    shell, flag, line = SERVICES["s3"]["entrypoint"]
    folder, s3["NANIO_DATA_DIR"] = s3["NANIO_DATA_DIR"], str(tmp_path)
    line = line.replace(f"{folder}/", f"{tmp_path}/").replace("0.0.0.0", f"127.0.0.1 --port {port}")
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **s3}
    mlflow = fill_environment("mlflow", S3_PASSWORD=SECRET)
    with subprocess.Popen([shell, flag, line], env=env, cwd=tmp_path) as served:
        try:
            client: Any = boto3.client(
                "s3",
                endpoint_url=f"http://127.0.0.1:{port}",
                region_name=mlflow["AWS_DEFAULT_REGION"],
                aws_access_key_id=mlflow["AWS_ACCESS_KEY_ID"],
                aws_secret_access_key=mlflow["AWS_SECRET_ACCESS_KEY"],
            )
            while True:
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                assert served.poll() is None
                time.sleep(0.1)
            bucket = mlflow["MLFLOW_ARTIFACTS_DESTINATION"].partition("//")[2]
            client.put_object(Bucket=bucket, Key="a", Body=b"1")
            assert client.get_object(Bucket=bucket, Key="a")["Body"].read() == b"1"
        finally:
            served.terminate()


def test_docker_reads_compose_and_hands_passwords_on_as_they_are() -> None:
    if not shutil.which("docker") or subprocess.run(["docker", "compose", "version"]).returncode:
        pytest.skip("Docker Compose is not here")
    env = {**os.environ, "POSTGRES_PASSWORD": SECRET, "S3_PASSWORD": SECRET}
    command = ["docker", "compose", "config", "--format", "json"]
    done = subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True, text=True)
    read = YAML(typ="safe").load(done.stdout)["services"]
    for name in ("postgres", "s3", "mlflow", "prefect"):
        filled = fill_environment(name, POSTGRES_PASSWORD=SECRET, S3_PASSWORD=SECRET)
        # It prints what it would read again, where $ begins a variable.
        assert {k: v.replace("$$", "$") for k, v in read[name]["environment"].items()} == filled


def _text(name: str) -> str:
    return (ROOT / name).read_text()


CONNECT = """
import asyncio, sys
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy import create_engine

async def ask():
    async with create_async_engine(sys.argv[1]).connect() as opened:
        await opened.execute(text("SELECT 1"))

if "asyncpg" in sys.argv[1]:
    asyncio.run(ask())
else:
    create_engine(sys.argv[1]).connect().execute(text("SELECT 1"))
"""


def _connects(uri: str, env: dict[str, str]) -> str:
    """What went wrong when a process with this environment asked the database; else nothing."""
    command = [sys.executable, "-c", CONNECT, uri]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)
    return done.stderr
