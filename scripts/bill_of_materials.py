"""What the images install: licences, checked against a list, or a CycloneDX bill of materials.

Both are read from requirements/lock and from the metadata of the same versions as they are
installed here.  The images' bases (Debian, Python, SGLang's image) have lists of their own.
"""

import argparse
import importlib.metadata
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

# What may be given away together with Apache-2.0, under conditions that a wheel meets by holding
# its own licence.  Nothing copyleft: not even the weak kind, which asks for more than a list.
ALLOWED = frozenset(
    {
        "0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "ISC", "MIT", "MIT-0",
        "PSF-2.0", "Unlicense", "Zlib",
    }
)  # fmt: skip

# Older metadata has a licence's title for its identifier.
_TITLES = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache Software License": "Apache-2.0",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
}
_CLASSIFIER = "License :: OSI Approved :: "
_SPDX = get_spdx_licensing()


class BillError(Exception):
    """A bill that cannot be made, or a licence that is not allowed; one line for each."""


@dataclass(frozen=True, slots=True)
class Part:
    """One locked package.  licence: an SPDX expression.  needs: names of other parts."""

    name: str
    version: str
    hashes: tuple[str, ...]
    licence: str
    needs: tuple[str, ...]


def locked(path: Path) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """(name, version, SHA-256 of its files) of every package in a lock."""
    for line in path.read_text().replace("\\\n", " ").splitlines():
        if found := re.match(r"([a-z0-9.-]+)==(\S+)", line):
            yield found[1], found[2], tuple(re.findall(r"--hash=sha256:([0-9a-f]{64})", line))


def parts(path: Path) -> list[Part]:
    """Raises BillError for packages that are not installed here in this version."""
    found, faults = [], []
    pins = list(locked(path))
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
            continue
        needs = sorted(names & set(_requirements(distribution)))
        found.append(Part(name, version, hashes, licence(distribution), tuple(needs)))
    if faults:
        raise BillError("\n".join(faults))
    return found


def _requirements(distribution: importlib.metadata.Distribution) -> Iterator[str]:
    for text in distribution.requires or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield canonicalize_name(requirement.name)


def licence(distribution: importlib.metadata.Distribution) -> str:
    """An SPDX expression, or what its authors wrote instead; "" for nothing."""
    said: dict[str, list[str]] = {
        name: distribution.metadata.get_all(name) or []
        for name in ("License-Expression", "Classifier", "License")
    }
    if said["License-Expression"]:
        return said["License-Expression"][0]
    titles = [
        line.removeprefix(_CLASSIFIER)
        for line in said["Classifier"]
        if line.startswith(_CLASSIFIER)
    ] or said["License"]
    return " AND ".join(_TITLES.get(title, title) for title in titles)


def is_allowed(expression: str) -> bool:
    """Whether a licence that may be chosen is on the list, and everything that has to be met."""
    try:
        parsed = _SPDX.parse(expression, validate=True)
    except ExpressionError:
        return False
    if parsed is None:
        return False
    answers = {
        symbol: _SPDX.TRUE if str(symbol) in ALLOWED else _SPDX.FALSE for symbol in parsed.symbols
    }
    return bool(parsed.subs(answers).simplify() == _SPDX.TRUE)


def licences(bill: Sequence[Part]) -> str:
    """A table.  Raises BillError for what is not allowed."""
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
    """CycloneDX 1.6, JSON, the same at every call.  Raises BillError where its schema says no."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    whole = _component(
        Part(project["name"], controller.__version__, (), project["license"], ()),
        ComponentType.APPLICATION,
    )
    components = {part.name: _component(part, ComponentType.LIBRARY) for part in bill}
    bom = Bom(components=components.values())
    bom.metadata.component = whole
    # Random and of now by default: two bills of the same lock would differ.
    bom.serial_number = None  # type: ignore[assignment]
    bom.metadata.timestamp = None  # type: ignore[assignment]
    for part in bill:
        bom.register_dependency(components[part.name], [components[name] for name in part.needs])
    direct = {canonicalize_name(Requirement(text).name) for text in project["dependencies"]}
    bom.register_dependency(whole, [components[name] for name in sorted(direct)])
    text = str(JsonV1Dot6(bom).output_as_string(indent=2))
    if error := JsonStrictValidator(JsonV1Dot6(bom).schema_version).validate_str(text):
        raise BillError(f"not valid: {error}")
    return text + "\n"


def _component(part: Part, kind: ComponentType) -> Component:
    purl = PackageURL("pypi", name=part.name, version=part.version)
    # The lock names no index, and so does the reference: a package URL is one as well.
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
    """Exit code 1 for a bill that cannot be made, or a licence that is not allowed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("licences", "sbom"))
    parser.add_argument("--output", type=Path, help="the file; without it only the check is made")
    options = parser.parse_args()
    try:
        if options.what == "sbom":
            text = sbom(parts(LOCKS / "sidecar.txt"))
        else:
            # The engine's lock holds the sidecar's and more.
            text = licences(parts(LOCKS / "engine.txt"))
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
