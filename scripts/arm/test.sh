#!/bin/sh
# `make test-arm`: the kernels, the decoder and a conversion on AArch64, under qemu: test.sh PYTHON
# PYTHON is this machine's, with the extra `test`. docs/arm.md names what may be set.
set -eu
cd "$(dirname "$0")/../.."
python=$1
export ARM_FOLDER="${ARM_FOLDER:-$PWD/.arm}"
PYTHON=$python sh scripts/arm/environment.sh "$ARM_FOLDER" > /dev/null
arm="nice -n 15 sh scripts/arm/python"
model=tests/data/qwen3-gptq-4bit-g128-sym

echo "every type, and layers with a state, as machine code emitted here"
nice -n 15 "$python" -m pytest -m "" tests/runtime/test_arm_code.py tests/runtime/test_arm_program.py

echo "a conversion, and a text by the decoder"
"$python" -m bridge.cli convert $model "$ARM_FOLDER/here.gguf" --force
$arm -m bridge.cli convert $model "$ARM_FOLDER/there.gguf" --force
cmp "$ARM_FOLDER/here.gguf" "$ARM_FOLDER/there.gguf"
prompt="KING EDWARD IV: My lords, the night is long and I have heard you speak of nothing but the war."
"$python" -m bridge.cli run "$ARM_FOLDER/here.gguf" -p "$prompt" -n 16 --temp 0 > "$ARM_FOLDER/here.txt"
$arm -m bridge.cli run "$ARM_FOLDER/there.gguf" -p "$prompt" -n 16 --temp 0 | tee "$ARM_FOLDER/there.txt"
cmp "$ARM_FOLDER/here.txt" "$ARM_FOLDER/there.txt"

echo "products, tiles, threads, attention: Numba's own compilation"
$arm -m pytest -p no:cacheprovider tests/runtime/test_kernels.py -k "${ARM_TESTS:-every_target_of or threads_agree}"
BRIDGE_CPU=neon $arm -m pytest -p no:cacheprovider tests/runtime/test_kernels.py -k "threads_agree"
$arm -m pytest -p no:cacheprovider tests/runtime/test_sequences.py -k one_context
