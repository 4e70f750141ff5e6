"""Writes what a wheel or an image is made of, as CycloneDX 1.6 in JSON, checked against its schema.
`make sbom` builds the wheel into dist/ and puts its list into the wheel, where PEP 770 wants it;
the Dockerfile writes that of the image, of its Python packages and Debian's."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

PINS = Path(__file__).resolve().parent
ROOT = PINS.parent
FIELDS = "${Package}\\t${Version}\\t${Architecture}\\t${db:Status-Status}\\n"


def main() -> None:
    match sys.argv[1:]:
        case ["wheel", python]:
            wheel = _build_wheel(python, ROOT / "dist")
            needed = keep_needed(_list_packages(python), read_needs())
            bill = write_bill(needed, wheel.with_suffix(".cdx.json"))
            put_into_wheel(wheel, bill)
            print(f"{wheel}, which holds its list\n{bill}")
        case ["image", python, file]:
            image = _list_packages(python)
            image["components"] += list_debian_packages()
            print(write_bill(image, Path(file)))
        case _:
            sys.exit("usage: python pins/sbom.py wheel PYTHON | image PYTHON FILE")


def _list_packages(python: str) -> dict[str, Any]:
    """Return the list of the environment of this Python."""
    command = [sys.executable, "-m", "cyclonedx_py", "environment", python, "--spec-version", "1.6"]
    command += ["--output-reproducible", "--pyproject", str(ROOT / "pyproject.toml")]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def read_needs() -> set[str]:
    """Return the names of what the project needs without an extra, and what that needs."""
    texts = [(PINS / f"{group}.txt").read_text() for group in ("run", "torch", "cuda")]
    return {name for text in texts for name in re.findall(r"(?m)^([\w.-]+)==", text)}


def keep_needed(bill: dict[str, Any], needs: set[str]) -> dict[str, Any]:
    """Return the list without what else is installed, such as what tests the project."""
    parts = [one for one in bill["components"] if _normalize(one["name"]) in needs]
    kept = {bill["metadata"]["component"]["bom-ref"], *(one["bom-ref"] for one in parts)}
    leads = [
        {"ref": one["ref"], "dependsOn": [ref for ref in one.get("dependsOn", []) if ref in kept]}
        for one in bill["dependencies"]
        if one["ref"] in kept
    ]
    return {**bill, "components": parts, "dependencies": leads}


def list_debian_packages() -> list[dict[str, Any]]:
    if not shutil.which("dpkg-query"):
        return []
    command = ["dpkg-query", "--show", f"--showformat={FIELDS}"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    found = {}
    for name, version, machine, status in rows:
        if status == "installed":
            url = f"pkg:deb/debian/{quote(name)}@{quote(version)}?arch={machine}"
            one = {"type": "library", "bom-ref": url, "name": name, "version": version}
            found[url] = {**one, "purl": url}
    return list(found.values())


def write_bill(bill: dict[str, Any], file: Path) -> Path:
    # Not where only the rest of this file is wanted: they lie in an environment of their own.
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    text = json.dumps(bill, indent=1)
    if problem := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        sys.exit(f"the list is no CycloneDX 1.6: {problem}")
    file.write_text(text)
    return file


def _build_wheel(python: str, folder: Path) -> Path:
    command = [python, "-m", "pip", "--quiet", "wheel", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True)
    shutil.rmtree(ROOT / "build", ignore_errors=True)  # a next wheel would hold what is left there
    return max(folder.glob("headroom-*.whl"), key=lambda file: file.stat().st_mtime)


def put_into_wheel(wheel: Path, bill: Path) -> None:
    """Add the list to the wheel, as PEP 770 says where, and to the wheel's own list of files."""
    with zipfile.ZipFile(wheel) as archive:
        parts = {entry: archive.read(entry) for entry in archive.infolist()}
    (record,) = (entry for entry in parts if entry.filename.endswith(".dist-info/RECORD"))
    name = f"{record.filename.rpartition('/')[0]}/sboms/headroom.cdx.json"
    content = bill.read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    parts[record] = f"{name},sha256={digest},{len(content)}\n".encode() + parts[record]
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
        for entry, data in parts.items():
            archive.writestr(entry, data)


def _normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
