"""Writes what a wheel or an image is made of, as CycloneDX 1.6 in JSON, checked against its schema.
`make sbom` builds the wheel into dist/ and puts its list into the wheel, where PEP 770 wants it;
the Dockerfile writes that of the image, of its Python packages and Debian's."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

ROOT = Path(__file__).resolve().parent.parent
FIELDS = "${Package}\\t${Version}\\t${Architecture}\\t${db:Status-Status}\\n"


def main() -> None:
    match sys.argv[1:]:
        case ["wheel", python]:
            wheel = _build_wheel(python, ROOT / "dist")
            bill = write_bill(_list_packages(python), wheel.with_suffix(".cdx.json"))
            put_into_wheel(wheel, bill)
            print(f"{wheel}, which holds its list\n{bill}")
        case ["image", python, file]:
            bill = _list_packages(python)
            bill["components"] += list_debian_packages()
            print(write_bill(bill, Path(file)))
        case _:
            sys.exit("usage: python pins/sbom.py wheel PYTHON | image PYTHON FILE")


def _list_packages(python: str) -> dict[str, Any]:
    """Return the list of what headroom needs of the environment of this Python, with what that
    needs; the rest of it, such as what tests it, is left out."""
    command = [sys.executable, "-m", "cyclonedx_py", "environment", python, "--spec-version", "1.6"]
    command += ["--output-reproducible", "--pyproject", str(ROOT / "pyproject.toml")]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return keep_needed(json.loads(done.stdout), _name_needs(python))


def _name_needs(python: str) -> set[str]:
    """Return the names that the project needs without an extra, as packages are called."""
    code = (
        "import re\nfrom importlib.metadata import requires\n"
        "print(*[re.match(r'[\\w.-]+', r)[0] for r in requires('headroom') if 'extra ==' not in r])"
    )
    done = subprocess.run([python, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    return {_normalize(name) for name in done.stdout.split()}


def keep_needed(bill: dict[str, Any], needs: set[str]) -> dict[str, Any]:
    """Return the list without the components to which no need leads."""
    root = bill["metadata"]["component"]["bom-ref"]
    leads = {one["ref"]: one.get("dependsOn", []) for one in bill["dependencies"]}
    names = {one["bom-ref"]: _normalize(one["name"]) for one in bill["components"]}
    leads[root] = [ref for ref in leads[root] if names.get(ref) in needs]
    kept, waiting = set(), [root]
    while waiting:
        ref = waiting.pop()
        if ref not in kept:
            kept.add(ref)
            waiting += leads.get(ref, [])
    return {
        **bill,
        "components": [one for one in bill["components"] if one["bom-ref"] in kept],
        "dependencies": [{"ref": ref, "dependsOn": leads.get(ref, [])} for ref in sorted(kept)],
    }


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
    text = json.dumps(bill, indent=1)
    if problem := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        sys.exit(f"the list is no CycloneDX 1.6: {problem}")
    file.write_text(text)
    return file


def _build_wheel(python: str, folder: Path) -> Path:
    command = [python, "-m", "pip", "--quiet", "wheel", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True)
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
    return name.lower().replace("_", "-").replace(".", "-")


if __name__ == "__main__":
    main()
