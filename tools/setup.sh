#!/bin/sh
# What building and testing need, checked and, where that is simple, installed.
#
#   sh tools/setup.sh toolchain   cargo and a C compiler (make build, make demo)
#   sh tools/setup.sh all         the same, Python packages, a Vulkan driver, a virtual screen, iproute2, Open MPI and NCCL (make test)
#   sh tools/setup.sh browser     cargo and a C compiler, chromium, node and npm (make test-web)
#   sh tools/setup.sh features    prints the cargo features that can be built and tested here
#
# A missing cargo or C compiler is an error, because nothing can be built. A missing Vulkan driver is
# not: the CPU executor needs none, and the tests of the shaders say that they were skipped.
# Nothing is done where nothing is missing.
set -eu

wanted=${1:-all}

say() { echo "setup: $*" >&2; }
have() { command -v "$1" >/dev/null 2>&1; }

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

can_install() {
    have apt-get && { [ "$(id -u)" = 0 ] || { have sudo && sudo -n true 2>/dev/null; }; }
}

updated=
apt_install() {
    can_install || return 1
    say "installing $* (apt)"
    if [ -z "$updated" ]; then
        # An unreachable extra repository is no reason to stop: the packages are Debian's own.
        as_root env DEBIAN_FRONTEND=noninteractive apt-get update -q >&2 || say "apt-get update failed; trying all the same"
        updated=yes
    fi
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "$@" >&2
}

# A Vulkan driver (ICD) is a JSON file in one of the loader's folders.
vulkan_driver() {
    [ -z "${VK_DRIVER_FILES:-}${VK_ICD_FILENAMES:-}" ] || return 0
    for folder in /usr/share/vulkan/icd.d /usr/local/share/vulkan/icd.d /etc/vulkan/icd.d \
        "${XDG_DATA_HOME:-${HOME:-/nonexistent}/.local/share}/vulkan/icd.d"; do
        for file in "$folder"/*.json; do
            [ -e "$file" ] && return 0
        done
    done
    return 1
}

vulkan_loader() {
    for folder in /usr/lib /usr/lib64 /usr/local/lib /lib; do
        for file in "$folder"/libvulkan.so.1 "$folder"/*-linux-*/libvulkan.so.1; do
            [ -e "$file" ] && return 0
        done
    done
    return 1
}

# The library by which the bindings to MPI are generated.
libclang() {
    for file in "${LIBCLANG_PATH:-/nonexistent}"/libclang* /usr/lib/llvm-*/lib/libclang*.so* /usr/lib/libclang*.so* \
        /usr/lib64/libclang*.so* /usr/lib/*-linux-*/libclang*.so*; do
        [ -e "$file" ] && return 0
    done
    return 1
}

if [ "$wanted" = features ]; then
    printf 'birkhoff/dashboard,birkhoff/nccl'
    if [ "$(uname -s)" = Linux ] && have mpicc && have mpirun && libclang; then printf ',birkhoff/mpi'; fi
    echo
    exit 0
fi

if ! have cargo; then
    if [ -x "${CARGO_HOME:-${HOME:-/nonexistent}/.cargo}/bin/cargo" ]; then
        say "cargo is installed but not on PATH; run: . \"${CARGO_HOME:-$HOME/.cargo}/env\""
    else
        say "cargo is missing; install Rust 1.90 or newer from https://rustup.rs and run this again"
    fi
    exit 1
fi

if ! have cc && ! have gcc && ! have clang; then
    apt_install gcc libc6-dev make || true
    if ! have cc; then
        say "no C compiler (cc); install one (Debian, Ubuntu: apt install build-essential; macOS: xcode-select --install)"
        exit 1
    fi
fi

if [ "$wanted" = browser ]; then
    # Not an error either: tools/test-web.sh says what it skips.
    [ "$(uname -s)" = Linux ] || exit 0
    missing=
    have chromium || have chromium-browser || have google-chrome || missing="$missing chromium"
    have node || missing="$missing nodejs"
    # Node's own packages bring npm, and Debian's npm conflicts with them.
    have npm || missing="$missing npm"
    if [ -n "$missing" ]; then
        # shellcheck disable=SC2086
        apt_install $missing || say "cannot install$missing from here; the browser tests will be skipped"
    fi
    exit 0
fi

[ "$wanted" = all ] || exit 0

# What reads exported models and event files in the tests: an environment of its own, made again when the list changes.
python_packages() {
    folder="${HOME:?}/.cache/birkhoff/python"
    list="$(dirname "$0")/python-requirements.txt"
    cmp -s "$list" "$folder/requirements.txt" && [ -x "$folder/bin/python" ] && return 0
    if ! python3 -c 'import ensurepip, venv' 2>/dev/null; then
        apt_install python3 python3-venv || return 1
    fi
    say "installing onnxruntime and tensorboard into $folder (pip)"
    rm -rf "$folder"
    python3 -m venv "$folder" && "$folder/bin/python" -m pip install -q --disable-pip-version-check -r "$list" >&2 || {
        # half of it would be worse than nothing: tests are skipped where there is none
        rm -rf "$folder"
        return 1
    }
    cp "$list" "$folder/requirements.txt"
}
python_packages || say "no Python 3.11 with venv, or pip cannot install; the tests of exported models and event files will be skipped"

# macOS has Metal and Windows DirectX 12.
[ "$(uname -s)" = Linux ] || exit 0

if ! vulkan_driver || ! vulkan_loader; then
    if ! apt_install mesa-vulkan-drivers libvulkan1; then
        say "no Vulkan driver found, and it cannot be installed from here; the tests of the shaders will be skipped"
        say "to have them: Debian, Ubuntu: apt install mesa-vulkan-drivers libvulkan1; Fedora: dnf install mesa-vulkan-drivers vulkan-loader; Arch: pacman -S vulkan-swrast vulkan-icd-loader"
    fi
fi

# A screen for the dashboard's window.
have Xvfb || apt_install xvfb || say "cannot install xvfb from here; the tests of the dashboard's window will be skipped"
# Presses its keys.
have xdotool || apt_install xdotool || say "cannot install xdotool from here; the dashboard's window will not be driven"

# Network namespaces and slow links, for ranks on two hosts.
if ! have ip || ! have tc; then
    apt_install iproute2 || say "cannot install iproute2 from here; training over a slow link will not be tested"
fi

# mpirun's tests: the library, its header, and what generates bindings from it.
if ! have mpicc || ! have mpirun || ! libclang; then
    apt_install openmpi-bin libopenmpi-dev libclang-dev || say "cannot install Open MPI and libclang from here; the MPI transport will be neither built nor tested"
fi

# NVIDIA's NCCL from PyPI (166 MB, the smallest of its wheels): without a device its tests go as far as loading it.
nccl() {
    folder="${HOME:?}/.cache/birkhoff/nccl"
    [ -e "$folder/nvidia/nccl/lib/libnccl.so.2" ] && return 0
    [ "$(uname -m)" = x86_64 ] || return 1
    say "downloading NCCL into $folder (pip)"
    "$HOME/.cache/birkhoff/python/bin/python" -m pip install -q --disable-pip-version-check --no-deps \
        --target "$folder" nvidia-nccl-cu12==2.19.3 >&2 || {
        rm -rf "$folder"
        return 1
    }
}
nccl || say "cannot download NCCL from here; the test that loads it will be skipped"
