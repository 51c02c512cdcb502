#!/bin/sh
# Writes the Python code for the contract below OUT_DIR (default: protos/), with the toolchain that
# protos/requirements.txt pins. Needs the bin directory of that toolchain's environment as TOOLS.
set -eu
cd "$(dirname "$0")/.."
tools="${TOOLS:-.venv-protos/bin}"
out="${1:-protos}"
PATH="$(cd "$tools" && pwd):$PATH"
mkdir -p "$out"
# Messages from every file; stubs and servicers only where a service is defined.
python -m grpc_tools.protoc -I protos --python_out="$out" --mypy_out=quiet:"$out" protos/penstock/v1/*.proto
python -m grpc_tools.protoc -I protos --grpc_python_out="$out" --mypy_grpc_out=quiet:"$out" \
    protos/penstock/v1/*_service.proto
