#!/bin/sh
# Prints the requirement of the torch to install: the CPU build where the indexes that pip is
# configured with offer it, else what they offer, on Linux mostly a CUDA build of several GB.
# Downloads only the index's page.
# Usage: torch_requirement.sh PYTHON (the interpreter to install for)
set -u
version=2.13.0
if "$1" -m pip --disable-pip-version-check index versions torch 2>/dev/null |
	grep -Eq "^Available versions:.* $version\+cpu(,|\$)"; then
	echo "torch==$version+cpu"
else
	echo "torch==$version"
fi
