"""Makes etcd_rpc_pb2.py and .pyi from etcd_rpc.proto: ``python -m regrow.store.generate [--out FOLDER]``.

Run it in an environment with grpcio-tools 1.71.2. Code from newer generators refuses older protobuf runtimes, and that
version does not install beside a new protobuf, so it is no dependency: make a virtual environment for it.
The generated file is checked in and carries the digest of the .proto it was made from; a test compares the two.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from pathlib import Path

PROTO = Path(__file__).with_name("etcd_rpc.proto")
_MARK = "# made from etcd_rpc.proto with sha256 "


def proto_digest() -> str:
    """SHA-256 of etcd_rpc.proto, hex."""
    return hashlib.sha256(PROTO.read_bytes()).hexdigest()


def recorded_digest(generated: Path) -> str:
    """The digest that a generated file carries; empty when it has none."""
    for line in generated.read_text(encoding="utf-8").splitlines():
        if line.startswith(_MARK):
            return line.removeprefix(_MARK)
    return ""


def generate(out: Path, *, python: str = sys.executable) -> list[Path]:
    """Run protoc. `out` becomes the root of the import path; returns the files made.

    Args:
        out: folder in which regrow/store/etcd_rpc_pb2.py is written.
        python: interpreter that has grpcio-tools.
    """
    root = PROTO.parents[2]
    out.mkdir(parents=True, exist_ok=True)
    command = [python, "-m", "grpc_tools.protoc", f"-I{root}", f"--python_out={out}", f"--pyi_out={out}", str(PROTO.relative_to(root))]
    subprocess.run(command, cwd=root, check=True)
    made = [out / "regrow" / "store" / f"etcd_rpc_pb2.{suffix}" for suffix in ("py", "pyi")]
    for path in made:
        path.write_text(f"{_MARK}{proto_digest()}\n{path.read_text(encoding='utf-8')}", encoding="utf-8")
    return made


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PROTO.parents[2], help="root of the import path to write under")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has grpcio-tools 1.71.2")
    arguments = parser.parse_args()
    for path in generate(arguments.out, python=arguments.python):
        print(path)


if __name__ == "__main__":
    main()
