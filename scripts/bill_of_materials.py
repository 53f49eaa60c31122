"""Checks the licences of what the images install, and writes a CycloneDX bill of materials.

Both read requirements/lock and the metadata of the same versions as they are installed here, and
the scripts of others that the sidecar's page carries (controller/page/vendor).  The images' bases
(Debian, Python, SGLang's image) have lists of their own.

Two tools come close and lose something: cyclonedx-py reads hashes from a lock or licences and
dependencies from an environment, never both in one bill, and pip-licenses neither evaluates SPDX
expressions nor refuses a package as long as one of its licences is allowed.
"""

import argparse
import hashlib
import importlib.metadata
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.validation.json import JsonStrictValidator
from license_expression import ExpressionError, get_spdx_licensing
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import controller

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "requirements" / "lock"
# One folder for each package, which holds its own package.json.
VENDORED = ROOT / "controller" / "page" / "vendor"

# Licences that may be distributed together with Apache-2.0, and whose conditions a wheel meets by
# holding its own licence text.  Copyleft licences are left out, the weak ones too.
ALLOWED = frozenset(
    {
        "0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "ISC", "MIT", "MIT-0",
        "PSF-2.0", "Unlicense", "Zlib",
    }
)  # fmt: skip

# Older metadata has the title of a licence instead of its SPDX identifier.
_TITLES = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache Software License": "Apache-2.0",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
}
_CLASSIFIER = "License :: OSI Approved :: "
_SPDX = get_spdx_licensing()


class BillError(Exception):
    """The bill cannot be made, or a licence is not allowed; the message has one line for each."""


@dataclass(frozen=True, slots=True)
class Part:
    """A locked or a vendored package.

    hashes: SHA-256 of its files.  licence: an SPDX expression.  needs: names of other parts.  kind:
    of package URL, which is the registry that it comes from.
    """

    name: str
    version: str
    hashes: tuple[str, ...]
    licence: str
    needs: tuple[str, ...]
    kind: str = "pypi"


def read_lock(path: Path) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yields the name, the version and the SHA-256 of the files of every package in a lock."""
    for line in path.read_text().replace("\\\n", " ").splitlines():
        if match := re.match(r"([a-z0-9.-]+)==(\S+)", line):
            yield match[1], match[2], tuple(re.findall(r"--hash=sha256:([0-9a-f]{64})", line))


def read_parts(*locks: Path) -> list[Part]:
    """Reads locks, and the metadata of their packages from this environment.

    Raises BillError for packages that are not installed here in the locked version.
    """
    packages, faults = [], []
    pins = sorted({pin for path in locks for pin in read_lock(path)})
    names = {name for name, _, _ in pins}
    for name, version, hashes in pins:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            faults.append(f"{name} {version} is not installed here: `make setup`")
            continue
        if distribution.version != version:
            faults.append(
                f"{name} {version} is installed here as {distribution.version}: `make lock`"
            )
        requirements = map(Requirement, distribution.requires or [])
        needs = names & {
            canonicalize_name(requirement.name)
            for requirement in requirements
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        }
        packages.append(Part(name, version, hashes, licence(distribution), tuple(sorted(needs))))
    if faults:
        raise BillError("\n".join(faults))
    return packages


def read_vendored(folder: Path = VENDORED) -> list[Part]:
    """Reads the packages whose files lie in the page's folder.

    Raises BillError for a package without its licence text, and for a file that is not the one in
    its list of SHA-256.
    """
    packages, faults = [], []
    for path in sorted(path.parent for path in folder.glob("*/package.json")):
        lines = [line.split() for line in (path / "SHA256SUMS").read_text().splitlines()]
        sums = {name: digest for digest, name in lines}
        digests = {
            file.name: hashlib.sha256(file.read_bytes()).hexdigest()
            for file in path.iterdir()
            if file.name != "SHA256SUMS"
        }
        faults += [
            f"{path.name}: {name} is not the file that SHA256SUMS names"
            for name in sorted(sums.keys() | digests.keys())
            if sums.get(name) != digests.get(name)
        ]
        if "LICENSE" not in digests:
            faults.append(f"{path.name}: there is no LICENSE")
        package_info = json.loads((path / "package.json").read_text())
        hashes = tuple(sorted(digests.values()))
        packages.append(
            Part(
                package_info["name"],
                package_info["version"],
                hashes,
                package_info["license"],
                (),
                "npm",
            )
        )
    if faults:
        raise BillError("\n".join(faults))
    return packages


def licence(distribution: importlib.metadata.Distribution) -> str:
    """Returns the SPDX expression, or the authors' text; "" if the metadata has no licence."""

    def read_field(field: str) -> list[str]:
        return distribution.metadata.get_all(field) or []

    if expressions := read_field("License-Expression"):
        return expressions[0]
    titles = [
        line.removeprefix(_CLASSIFIER) for line in read_field("Classifier") if _CLASSIFIER in line
    ] or read_field("License")
    return " AND ".join(_TITLES.get(title, title) for title in titles)


def is_allowed(expression: str) -> bool:
    """Tells whether the allowed licences are enough to fulfil an SPDX expression."""
    try:
        parsed = _SPDX.parse(expression, validate=True)
    except ExpressionError:
        return False
    if parsed is None:
        return False
    allowed = {
        symbol: _SPDX.TRUE if str(symbol) in ALLOWED else _SPDX.FALSE for symbol in parsed.symbols
    }
    return bool(parsed.subs(allowed).simplify() == _SPDX.TRUE)


def licences(bill: Sequence[Part]) -> str:
    """Returns a Markdown table.  Raises BillError for licences that are not allowed."""
    faults = [
        f"{part.name} {part.version}: {part.licence or 'no licence'} is not on the list"
        for part in bill
        if not is_allowed(part.licence)
    ]
    if faults:
        raise BillError("\n".join(faults))
    rows = "".join(f"| {part.name} | {part.version} | {part.licence} |\n" for part in bill)
    return f"| package | version | licence |\n|---|---|---|\n{rows}"


def sbom(bill: Sequence[Part]) -> str:
    """Returns CycloneDX 1.6 JSON, the same at every call.  Raises BillError if it is not valid."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    product = _component(
        Part(project["name"], controller.__version__, (), project["license"], ()),
        ComponentType.APPLICATION,
    )
    components = {part.name: _component(part, ComponentType.LIBRARY) for part in bill}
    bom = Bom(components=components.values())
    bom.metadata.component = product
    # By default a random number and the present time: two bills of the same lock would differ.
    bom.serial_number = None  # type: ignore[assignment]
    bom.metadata.timestamp = None  # type: ignore[assignment]
    for part in bill:
        bom.register_dependency(components[part.name], [components[name] for name in part.needs])
    direct = [canonicalize_name(Requirement(text).name) for text in project["dependencies"]]
    carried = [part.name for part in bill if part.kind == "npm"]
    bom.register_dependency(product, [components[name] for name in sorted({*direct, *carried})])
    text = str(JsonV1Dot6(bom).output_as_string(indent=2))
    if error := JsonStrictValidator(JsonV1Dot6(bom).schema_version).validate_str(text):
        raise BillError(f"not valid: {error}")
    return text + "\n"


def _component(part: Part, kind: ComponentType) -> Component:
    purl = PackageURL(part.kind, name=part.name, version=part.version)
    # A reference needs a URL; the package URL is one, and it names no index, as the lock does not.
    files = ExternalReference(
        type=ExternalReferenceType.DISTRIBUTION,
        url=XsUri(purl.to_string()),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=text) for text in part.hashes],
    )
    return Component(
        name=part.name,
        version=part.version,
        type=kind,
        purl=purl,
        bom_ref=purl.to_string(),
        licenses=[LicenseExpression(part.licence)],
        external_references=[files] if part.hashes else [],
    )


def main() -> int:
    """Returns exit code 1 if the bill cannot be made or a licence is not allowed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("licences", "sbom"))
    parser.add_argument(
        "--output", type=Path, help="file to write; without it, only the check is made"
    )
    options = parser.parse_args()
    try:
        if options.what == "sbom":
            text = sbom([*read_parts(LOCKS / "sidecar.txt"), *read_vendored()])
        else:
            text = licences(
                [*read_parts(LOCKS / "sidecar.txt", LOCKS / "engine.txt"), *read_vendored()]
            )
    except BillError as error:
        print(f"{options.what}: {error}", file=sys.stderr)
        return 1
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text, encoding="utf-8")
        print(f"{options.what}: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
