"""Compares meshnet/v1 with what proto/ generates now; `--write` replaces it instead."""

from __future__ import annotations

import filecmp
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("meshnet/v1")


def generate(target: Path) -> None:
    """Writes the generated package below `target`."""
    protos = sorted(str(path.relative_to(ROOT / "proto")) for path in (ROOT / "proto").rglob("*.proto"))
    out = [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-I", "proto", *out, *protos], cwd=ROOT, check=True)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh, committed = Path(folder) / PACKAGE, ROOT / PACKAGE
        names = {path.name for path in fresh.iterdir()} | {path.name for path in committed.glob("*_pb2*")}
        _, different, missing = filecmp.cmpfiles(fresh, committed, sorted(names), shallow=False)
        if "--write" in sys.argv:
            for name in different + missing:
                (committed / name).unlink(missing_ok=True)
                if (fresh / name).exists():
                    shutil.copy(fresh / name, committed / name)
        elif different or missing:
            print(f"meshnet/v1 is not what proto/ generates: {', '.join(different + missing)}; run `make generate`")
            return 1
    print(f"{PACKAGE}: {len(names)} generated files are up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
