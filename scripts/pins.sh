#!/bin/sh
# Write the versions that are installed in $VENV into constraints.txt. What belongs to one build of torch is left out:
# torch itself pins it (nvidia-*, triton, cuda-*).
set -eu

VENV=${VENV:-.venv}
{
    echo "# Every version that is installed and tested. Made by: make pins"
    "$VENV/bin/python" -m pip --disable-pip-version-check freeze --exclude-editable --exclude pagewalk |
        grep -viE '^(nvidia-|triton|cuda-|pip==|setuptools==)' | sed -E 's/^(torch==[0-9.]+)\+.*/\1/'
} >constraints.txt.new
mv constraints.txt.new constraints.txt
