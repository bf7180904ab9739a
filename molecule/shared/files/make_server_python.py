"""Makes a Python that looks as if SGLang were installed for it: metadata and empty packages, nothing that runs.

python3 make_server_python.py FOLDER '{"torch": "2.14.1+cu130", ...}'
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

IMPORT_NAMES = {"flashinfer-python": "flashinfer", "sglang-kernel": "", "flashinfer-cubin": "", "sgl-kernel": ""}
REQUIRES = {"sglang": ["torch==2.14.1", "sglang-kernel==0.4.10", "flashinfer_python[cu13]==0.7.2"]}


def main(folder: Path, packages: dict[str, str]) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = next((folder / "lib").glob("python*/site-packages"))
    for name, version in packages.items():
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {one}" for one in REQUIRES.get(name, [])]
        (info / "METADATA").write_text("\n".join([*lines, ""]))
        inner = IMPORT_NAMES.get(name, name)
        if inner:
            (site / inner).mkdir(exist_ok=True)
            (site / inner / "__init__.py").touch()
    if "torch" in packages:
        cuda = packages["torch"].partition("+cu")[2]
        text = f"__version__ = '{packages['torch']}'\ncuda: Optional[str] = '{cuda[:-1]}.{cuda[-1:]}'\n"
        (site / "torch/version.py").write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
