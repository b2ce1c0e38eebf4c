# Sourced by ci/demo and ci/test: finds a Python, and makes the virtual environment that both share.
# shellcheck shell=bash

set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${XATTN_VENV:-$ROOT/.venv}

# The folder a command is run from must not stand in for the installed package. (Python knows this since 3.11.)
export PYTHONSAFEPATH=1
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

environment_help() {
    cat <<'EOF'
Environment:
  PYTHON       the Python to use, 3.10 or newer (default: the first such of python3, python, python3.13 ...)
  XATTN_VENV   where to make the virtual environment (default: .venv in the checkout)
  XATTN_TORCH  what to install as torch, as pip takes it, options included, e.g. XATTN_TORCH="torch==2.13.0"
               or XATTN_TORCH="torch --index-url URL" with an address from PyTorch's installation page.

torch is installed only where none is: a torch >= 2.10 that PYTHON can import is used as it is and never replaced.
Otherwise XATTN_TORCH is installed into the virtual environment. Its default:
  no GPU                 a CPU build (+cpu) if pip's configured sources offer one, else torch>=2.10, which on
                         Linux may bring gigabytes of CUDA
  NVIDIA GPU             torch>=2.10
  AMD GPU                none: the usual index has no ROCm build, so XATTN_TORCH must say where one is
EOF
}

say() { echo "== $*" >&2; }
die() {
    echo "error: $*" >&2
    exit 1
}

has_nvidia() { [[ $(nvidia-smi -L 2>/dev/null) == *GPU* ]]; }
has_amd() { [[ -e /dev/kfd && $(rocminfo 2>/dev/null) == *gfx* ]]; }

# Sets PYTHON.
choose_python() {
    local candidates=(python3 python python3.13 python3.12 python3.11 python3.10) candidate
    [[ -n ${PYTHON:-} ]] && candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            PYTHON=$("$candidate" -c 'import sys; print(sys.executable)')
            return
        fi
    done
    die "xattn needs Python 3.10 or newer; tried: ${candidates[*]}. Set PYTHON to one."
}

# Prints the version of the torch that a Python imports and the folder it lies in; fails if there is none >= 2.10.
find_torch() {
    "$1" - 2>/dev/null <<'EOF'
import pathlib, re, sys, torch
version = torch.__version__
if tuple(map(int, re.findall(r"\d+", version)[:2])) < (2, 10):
    sys.exit(1)
print(version, pathlib.Path(torch.__file__).parents[1])
EOF
}

python_minor() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

make_venv() {
    # Where our own environment is the active one, what it was made from is meant.
    PYTHON=$("$PYTHON" -c 'import os, sys
print(sys._base_executable if os.path.realpath(sys.prefix) == os.path.realpath(sys.argv[1]) else sys.executable)' "$VENV")
    if [[ -x $VENV/bin/pip ]]; then
        [[ $(python_minor "$VENV/bin/python") == $(python_minor "$PYTHON") ]] ||
            die "$VENV was made by another Python than $PYTHON: remove it, or set XATTN_VENV to another folder"
        return
    fi
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$PYTHON cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv"
    say "making $VENV with $PYTHON"
    "$PYTHON" -m venv "$VENV"
}

# What to give to pip for torch, in TORCH_REQUIREMENT (words).
choose_torch() {
    local cpu_build
    if [[ -n ${XATTN_TORCH:-} ]]; then
        read -ra TORCH_REQUIREMENT <<<"$XATTN_TORCH"
    elif has_amd && ! has_nvidia; then
        die "this machine has an AMD GPU and $PYTHON has no torch >= 2.10; install ROCm's, or set XATTN_TORCH (see --help)"
    else
        TORCH_REQUIREMENT=("torch>=2.10")
        has_nvidia && return
        # pip takes the newest release, so a CPU build that it can see has to be asked for by its full version.
        cpu_build=$("$VENV/bin/pip" index versions torch 2>/dev/null | grep -oE '[0-9.]+\+cpu' | sort -Vr | head -n 1) || true
        if [[ -n $cpu_build ]] && printf '%s\n' 2.10 "$cpu_build" | sort -VC; then
            TORCH_REQUIREMENT=("torch==$cpu_build")
        elif [[ $(uname -s) == Linux ]]; then
            say "no GPU and no CPU build of torch in sight: torch may bring gigabytes of CUDA; see XATTN_TORCH in --help"
        fi
    fi
}

# Puts a torch within the environment's reach: PYTHON's own if it will do, else XATTN_TORCH. Sets TORCH_VERSION.
provide_torch() {
    local found site
    if found=$(find_torch "$PYTHON"); then
        # A path file, not --system-site-packages: it also reaches the packages of an active environment or conda.
        site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        echo "${found#* }" >"$site/base_torch.pth"
        say "using torch ${found%% *} from ${found#* }; nothing there is changed"
    elif [[ -n ${XATTN_TORCH:-} ]] || ! find_torch "$VENV/bin/python" >/dev/null; then
        choose_torch
        say "installing ${TORCH_REQUIREMENT[*]} (XATTN_TORCH sets another)"
        "$VENV/bin/pip" install "${TORCH_REQUIREMENT[@]}"
    fi
    found=$(find_torch "$VENV/bin/python") || die "$VENV has no torch >= 2.10 that can be imported"
    TORCH_VERSION=${found%% *}
}

# The extra that compiles and launches kernels on this machine's GPU with the torch at hand; empty without a GPU.
gpu_extra() {
    has_nvidia || has_amd || return 0
    "$VENV/bin/python" -c '
import torch
cuda = (torch.version.cuda or "").split(".")[0]
print("rocm" if torch.version.hip else f"cuda{cuda}" if cuda in ("12", "13") else "")'
}

# The version of the environment's torch as pip knows it: torch's own may say behind it what it was built for (+cu130).
torch_release() {
    "$VENV/bin/python" - "$TORCH_VERSION" <<'EOF'
import sys
from importlib.metadata import PackageNotFoundError, version
try:
    print(version("torch"))
except PackageNotFoundError:
    print(sys.argv[1].partition("+")[0])
EOF
}

# install_xattn EXTRA: the checkout with that extra, from new or as little of it as changed since the last time.
install_xattn() {
    local extra=$1 gpu stamp=$VENV/xattn-$1.stamp sources=$VENV/xattn-sources.stamp wanted tree
    choose_python
    make_venv
    wanted=$(cat "$ROOT/pyproject.toml" <(echo "${XATTN_TORCH:-}") | cksum)
    tree=$(cd "$ROOT" && shopt -s nullglob && find README.md xattn csrc_* -type f ! -name '*.pyc' | sort | xargs cksum | cksum)
    if [[ $(cat "$stamp" 2>/dev/null) != "$wanted" ]]; then
        provide_torch
        gpu=$(gpu_extra)
        say "installing xattn[$extra${gpu:+,$gpu}]"
        # The constraint: what a dependency wants of torch may fail, but must not replace it.
        echo "torch==$(torch_release)" >"$VENV/constraints.txt"
        "$VENV/bin/pip" install --constraint "$VENV/constraints.txt" "${ROOT}[$extra${gpu:+,$gpu}]"
        echo "$wanted" >"$stamp"
    elif [[ $(cat "$sources" 2>/dev/null) != "$tree" ]]; then
        say "installing the changed xattn"
        "$VENV/bin/pip" install --quiet --no-deps --force-reinstall "$ROOT"
    fi
    echo "$tree" >"$sources"
}
