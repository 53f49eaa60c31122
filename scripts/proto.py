"""Generates the typed stubs beside the .proto files, or checks that they are up to date.

The stubs have to run in SGLang's environments, whatever protobuf and grpcio those carry.  Code
generated for protobuf 4.25 makes no check of the runtime's version and runs on everything newer, so
the compiler is that old; the type stubs come from a newer plugin, which types the asyncio side.
The two do not go together in one environment, hence one each, under build/ (made when missing).

    python scripts/proto.py            writes the stubs
    python scripts/proto.py --check    exits 1 and names the files that differ
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
PACKAGE = Path("speculation/v1")
ENVIRONMENTS = ROOT / "build" / "proto"
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")

# setuptools: grpcio-tools of that age imports pkg_resources, which later ones no longer have.
COMPILER = ("grpcio-tools==1.62.3", "protobuf==4.25.9", "setuptools==80.9.0")
TYPING = ("mypy-protobuf==5.1.0", "protobuf==7.36.2")


def environment(name: str, requirements: tuple[str, ...]) -> Path:
    """The bin directory of a small virtual environment that holds exactly these requirements."""
    home = ENVIRONMENTS / name
    stamp = home / "requirements"
    wanted = "\n".join(requirements)
    if not stamp.is_file() or stamp.read_text() != wanted:
        print(f"proto: making {home.relative_to(ROOT)} ({', '.join(requirements)})", flush=True)
        venv.create(home, with_pip=True, clear=True)
        pip = [str(home / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "-qq", *requirements], check=True)
        stamp.write_text(wanted)
    return home / "bin"


def generate(source: Path, out: Path) -> None:
    """Writes the stubs of every .proto file under `source` to `out`.

    Raises subprocess.CalledProcessError when the compiler refuses a file.
    """
    compiler = environment("compiler", COMPILER)
    typing = environment("typing", TYPING)
    protoc = [str(compiler / "python"), "-m", "grpc_tools.protoc", f"--proto_path={source}"]
    messages = sorted(source.rglob("*.proto"))
    services = [path for path in messages if "\nservice " in path.read_text()]
    for plugin, outputs, files in (
        ("protoc-gen-mypy", ("python_out=", "mypy_out=quiet:"), messages),
        ("protoc-gen-mypy_grpc", ("grpc_python_out=", "mypy_grpc_out=quiet:"), services),
    ):
        subprocess.run(
            [
                *protoc,
                f"--plugin={plugin}={typing / plugin}",
                *(f"--{output}{out}" for output in outputs),
                *(str(path.relative_to(source)) for path in files),
            ],
            check=True,
        )


def stubs(directory: Path) -> dict[str, str]:
    """Name and text of the generated files in a directory."""
    return {path.name: path.read_text() for glob in GENERATED for path in directory.glob(glob)}


def differences(source: Path) -> list[str]:
    """Names of the stubs beside `source`'s .proto files that are not what they generate."""
    with tempfile.TemporaryDirectory() as out:
        generate(source, Path(out))
        wanted = stubs(Path(out) / PACKAGE)
    found = stubs(source / PACKAGE)
    return sorted(n for n in wanted.keys() | found.keys() if wanted.get(n) != found.get(n))


def write(source: Path) -> None:
    """Replaces the stubs beside the .proto files."""
    with tempfile.TemporaryDirectory() as out:
        generate(source, Path(out))
        for name in stubs(source / PACKAGE):
            (source / PACKAGE / name).unlink()
        for name in stubs(Path(out) / PACKAGE):
            shutil.copy(Path(out) / PACKAGE / name, source / PACKAGE / name)


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only compare")
    parser.add_argument("--source", type=Path, default=PROTO, help="root of the .proto files")
    arguments = parser.parse_args()
    source: Path = arguments.source.resolve()
    if not arguments.check:
        write(source)
        return 0
    drifted = differences(source)
    for name in drifted:
        print(f"{PACKAGE / name} is not what the .proto files generate; run `make proto`")
    return 1 if drifted else 0


if __name__ == "__main__":
    sys.exit(main())
