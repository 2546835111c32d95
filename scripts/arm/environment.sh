#!/bin/sh
# An AArch64 Python with what the tests need, in a folder: environment.sh FOLDER
# Debian's arm64 packages are unpacked, not installed, and Python's are aarch64 wheels; nothing outside FOLDER changes.
set -eu
folder=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$(dirname "$0")/../.."
suite=${DEBIAN_SUITE:-bookworm}
python=${ARM_PYTHON:-3.11}  # of that suite
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
libraries="libc6 libgcc-s1 libstdc++6 zlib1g libexpat1 libffi8 libbz2-1.0 liblzma5 libsqlite3-0 libssl3 libuuid1 libcrypt1
    libncursesw6 libtinfo6 libreadline8 libnsl2 libtirpc3 libgssapi-krb5-2 libkrb5-3 libk5crypto3 libkrb5support0 libcom-err2
    libkeyutils1 libdb5.3"

# apt with lists and architecture of its own
apt=$folder/apt
mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$folder/debs" "$folder/root"
: > "$apt/status"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" > "$apt/sources.list"
cat > "$apt/apt.conf" <<EOF
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
APT::Sandbox::User "";
Dir::State "$apt";
Dir::State::status "$apt/status";
Dir::Cache "$apt/cache";
Dir::Etc::sourcelist "$apt/sources.list";
Dir::Etc::sourceparts "-";
EOF
if [ ! -e "$folder/.debs" ]; then
    APT_CONFIG=$apt/apt.conf apt-get -qq update
    # shellcheck disable=SC2086
    (cd "$folder/debs" && APT_CONFIG=$apt/apt.conf apt-get -qq download \
        "python$python-minimal" "libpython$python-minimal" "python$python" "libpython$python-stdlib" $libraries)
    for package in "$folder"/debs/*.deb; do
        dpkg-deb -x "$package" "$folder/root"
    done
    touch "$folder/.debs"
fi

# wheels; hf-xet and the like are not needed to read files that are here
if [ ! -e "$folder/.wheels" ]; then
    "${PYTHON:-python3}" -m pip install --quiet --target "$folder/site" --upgrade --only-binary=:all: --python-version "$python" \
        --implementation cp --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 \
        --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 \
        -c constraints.txt "gguf>=0.18" "huggingface_hub>=0.30" "jinja2>=3.1.6" "numba>=0.62" "numpy>=1.26" \
        "safetensors>=0.5" "tokenizers>=0.20" "pytest>=8" "hypothesis>=6" "psutil>=5" "xllamacpp>=2026.9"
    touch "$folder/.wheels"
fi
echo "$folder"
