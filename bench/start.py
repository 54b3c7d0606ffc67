"""How long a server takes to be ready: weights in safetensors files, read back from the page cache.

    pagewalk bench start --shape 8b [--repeat 3] [-- FLAGS]

Makes a model folder with random weights of a shape, starts `pagewalk serve` on it again and again, and takes from the
log's line `ready` the seconds of each phase; wall_s counts from the start of the process. The first start may compile
kernels. FLAGS go to the server. A line of JSON each start.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.offline import SHAPES
from bench.serve import shape_folder
from model.config import read_config
from model.parameters import parts_of, random_parameters


def write_weights(folder: Path) -> int:
    """One safetensors file of random weights for the folder's config.json. Returns its bytes."""
    config = read_config(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parts = parts_of(config, random_parameters(config, torch.bfloat16, device))
    file = folder / "model.safetensors"
    save_file({part.name: part.target.contiguous().cpu() for part in parts}, file)
    del parts
    if device == "cuda":
        torch.cuda.empty_cache()
    return file.stat().st_size


def start_once(folder: Path, flags: list[str]) -> dict[str, Any]:
    """Start a server, wait until it is ready, and end it."""
    command = [sys.executable, "-P", "-m", "service", "serve", "--model", str(folder), "--port", "0"]
    command += ["--admin-port", "0", "--log-level", "info", "--log-format", "json", *flags]
    began = time.monotonic()
    server = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        assert server.stderr is not None
        for line in server.stderr:
            said = json.loads(line) if line.startswith("{") else {}
            if said.get("event") == "ready":
                wall_s = round(time.monotonic() - began, 2)
                return {"wall_s": wall_s, "seconds": said["seconds"], "phases_s": said["phases_s"]}
            if said.get("level") in ("error", "critical") or not said:
                sys.stderr.write(line)
        raise SystemExit(f"the server ended with code {server.wait()}")
    finally:
        server.terminate()
        server.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smol")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("flags", nargs="*", help="for the server, behind --")
    chosen = parser.parse_args()
    with shape_folder(chosen.shape) as folder:
        weights = write_weights(folder)
        for number in range(chosen.repeat):
            result = {"bench": "start", "shape": chosen.shape, "weights_bytes": weights, "start": number}
            print(json.dumps(result | start_once(folder, chosen.flags)), flush=True)


if __name__ == "__main__":
    main()
