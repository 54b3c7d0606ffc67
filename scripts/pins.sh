#!/bin/sh
# Write the versions that are installed in $VENV, which has a CPU build of torch, into two files:
#   constraints.txt       everything
#   constraints-cpu.txt   NVIDIA's packages, which a CUDA build of torch pins itself, to versions of its own
set -eu

VENV=${VENV:-.venv}
NVIDIA='^(nvidia-|cuda-|cupy-|triton)'
frozen=$("$VENV/bin/python" -m pip --disable-pip-version-check freeze --exclude pagewalk --exclude-editable |
    grep -viE '^(pip|setuptools)==' | sed -E 's/^(torch==[0-9.]+)\+.*/\1/')
{
    echo "# Every version that is installed and tested. Made by: make pins"
    echo "$frozen" | grep -viE "$NVIDIA"
} >constraints.txt
{
    echo "# The same for a CPU build of torch; a CUDA build pins these itself. Made by: make pins"
    echo "$frozen" | grep -iE "$NVIDIA"
} >constraints-cpu.txt
