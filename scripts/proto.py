"""Generates the typed stubs beside the .proto files, or checks that they are up to date.

The stubs have to run in SGLang's environments, with whatever protobuf and grpcio those have.  Code
generated for protobuf 4.25 does not check the runtime's version and runs on everything newer, so
the compiler is that old; the type stubs come from a newer plugin, which types the asyncio side.
The two do not fit into one environment, so each has its own under build/ (made when missing).
`buf generate` does not replace this script: gRPC's Python generator is built into the protoc of
grpcio-tools, and buf calls a protoc only for generators that it knows by name.

    python scripts/proto.py            writes the stubs
    python scripts/proto.py --check    exits 1 and names the files that differ
"""

import argparse
import subprocess
import sys
import tempfile
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
    """Returns the bin directory of a virtual environment that has these requirements."""
    home = ENVIRONMENTS / name
    uv = [sys.executable, "-m", "uv", "--quiet"]
    make = [*uv, "venv", "--allow-existing", "--python", sys.executable, str(home)]
    subprocess.run(make, check=True)
    subprocess.run([*uv, "pip", "install", "--python", str(home), *requirements], check=True)
    return home / "bin"


def generate(source: Path, target: Path) -> None:
    """Writes the stubs of every .proto file under `source` to `target`.

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
                *(f"--{output}{target}" for output in outputs),
                *(str(path.relative_to(source)) for path in files),
            ],
            check=True,
        )


def stubs(directory: Path) -> dict[str, str]:
    """Returns the name and the text of each generated file in a directory."""
    return {path.name: path.read_text() for glob in GENERATED for path in directory.glob(glob)}


def main() -> int:
    """Runs the command line and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only compare")
    parser.add_argument("--source", type=Path, default=PROTO, help="root of the .proto files")
    arguments = parser.parse_args()
    source: Path = arguments.source.resolve()
    with tempfile.TemporaryDirectory() as scratch:
        generate(source, Path(scratch))
        generated = stubs(Path(scratch) / PACKAGE)
    current = stubs(source / PACKAGE)
    changed = sorted(
        n for n in generated.keys() | current.keys() if generated.get(n) != current.get(n)
    )
    for name in changed:
        if arguments.check:
            print(f"{PACKAGE / name} is not what the .proto files generate; run `make proto`")
        elif name in generated:
            (source / PACKAGE / name).write_text(generated[name])
        else:
            (source / PACKAGE / name).unlink()
    return int(arguments.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
