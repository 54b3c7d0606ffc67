#!/bin/sh
# Write what the images install, with the hash of every file, into deploy/locks. cpu.txt and gpu.txt are made from pyproject.toml and
# constraints.txt, for Linux on x86-64 and the Python of the images (Dockerfile). Needs uv: pip install uv
#
# torch's CPU build is not on PyPI: TORCH_CPU is where it is found, an index or a folder of wheels.
set -eu

UV=${UV:-uv}
TORCH_CPU=${TORCH_CPU:-https://download.pytorch.org/whl/cpu}
PYTHON_VERSION=$(sed -n 's/^ARG PYTHON_VERSION=//p' Dockerfile)
mkdir -p deploy/locks

lock() { # lock FILE SOURCE OPTION...
    file=deploy/locks/$1.txt
    shift
    "$UV" pip compile "$@" -o "$file" --quiet --no-config --upgrade --no-annotate --no-header \
        --python-version "$PYTHON_VERSION" --python-platform x86_64-manylinux_2_28 --generate-hashes
    printf '%s\n' "# What the image installs, by hash. Made by: make locks" | cat - "$file" >"$file.new"
    mv "$file.new" "$file"
}

pins=$(mktemp)
trap 'rm -f "$pins"' EXIT
echo 'setuptools>=77' | lock build -
echo 'vllm-router>=0.1.17' | lock router -
torch=$(sed -n 's/^torch==//p' constraints.txt)
grep -v '^torch==' constraints.txt >"$pins"
lock gpu pyproject.toml --extra cuda -c constraints.txt
lock cpu pyproject.toml -c "$pins" -c /dev/stdin --find-links "$TORCH_CPU" <<PIN
torch==$torch+cpu
PIN
