# shellcheck shell=bash
# Creates and fills .venv. run_train.sh and run_tests.sh source this file and call: setup_venv train|tests
#
# A stamp in .venv says what was installed from what. While it holds, a start costs some milliseconds; when a dependency
# changes, pip brings the environment up to date; an environment that was moved, or whose installation was interrupted,
# is made anew.
#   PYTHON=...       the interpreter to build with (default: python3 if it is 3.11 to 3.14, else the newest of those found)
#   GPU_EXTRAS=0     leave out mamba-ssm and causal-conv1d, which a GPU machine may have to compile for a long time
#   pip's settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, its files) are honoured

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
venv="$root/.venv"
log="$venv/install.log"
# Not compiled at once: most modules of the large packages are never imported.
pip=("$venv/bin/python" -m pip --no-input --disable-pip-version-check install --no-color --progress-bar off
    --no-compile --no-build-isolation -c "$root/constraints.txt")

# Device files, because asking the driver takes up to a second on some machines, and every start comes by here.
has_gpu() { [[ -e /dev/nvidiactl || -e /dev/dxg ]] && command -v nvidia-smi > /dev/null; }

# Everything the environment depends on; the path, because the scripts inside name it.
stamp() {
    echo "$venv, $("$venv/bin/python" -V 2>&1), $(has_gpu && echo GPU || echo CPU)," \
        "$(cat "$root"/{pyproject.toml,constraints.txt,tools/setup_venv.sh} | cksum)"
}

is_current() {
    [[ -x "$venv/bin/python" && -f "$venv/stamp-$1" && ! -e "$venv/unfinished" && "$(stamp)" == "$(< "$venv/stamp-$1")" ]]
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3.14 python3.13 python3.12 python3.11; do
        # Prints the interpreter itself: a version manager's shim would choose by folder, and slowly.
        "$candidate" -c 'import sys, venv, ensurepip
if not (3, 11) <= sys.version_info[:2] <= (3, 14): sys.exit(1)
print(sys.executable)' 2> /dev/null && return
    done
    echo "No Python 3.11 to 3.14 with the venv module was found: install one, or name it as PYTHON=/path/to/python." >&2
    return 1
}

# step LABEL COMMAND...: runs quietly; a terminal shows meanwhile the seconds and the last line of the log.
step() {
    local label="$1" start=$SECONDS status=0 ticker=""
    : > "$log"
    if [[ -t 1 && -z "${CI:-}" ]]; then
        while sleep 0.5 && kill -0 $$ 2> /dev/null; do
            printf '\r  %-38s%5d s  %.50s\033[K' "$label" $((SECONDS - start)) "$(tail -n 1 "$log")"
        done &
        ticker=$!
    fi
    "${@:2}" >> "$log" 2>&1 || status=$?
    if [[ -n "$ticker" ]]; then
        kill "$ticker" 2> /dev/null || true
        wait "$ticker" 2> /dev/null || true
        printf '\r\033[K'
    fi
    printf '  %-38s%5d s%s\n' "$label" $((SECONDS - start)) "$( ((status)) && echo '  failed')"
    return "$status"
}

# must LABEL PIP-ARGUMENTS...: a step without which nothing works.
must() {
    local status=0
    step "$1" "${pip[@]}" "${@:2}" || status=$?
    ((status)) || return 0
    # pip changes nothing before it has fetched everything, so what it gave up on can be taken up again.
    ((status < 128)) && rm -f "$venv/unfinished"
    printf '\nThe installation failed. The last lines of %s:\n' "$log" >&2
    tail -n 20 "$log" >&2
    exit 1
}

# optional MODULE LABEL COMMAND...: a step that may fail; its outcome goes into $extras_report.
optional() {
    local kept="install-$1.log"
    if step "$2" "${@:3}" && "$venv/bin/python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$1') is None)"; then
        extras_report+="$2 yes, "
    else
        cp "$log" "$venv/$kept"
        extras_report+="$2 no (.venv/$kept says why), "
    fi
}

# The packages of fast kernels. With a GPU they are built for it. Without one only the tests want them, to interpret the
# Triton kernels in them, and the rest is left unbuilt (and out of pip's cache, where a GPU machine might find it).
# mamba-ssm comes without its dependencies: it pins old versions of some that its scan does not use.
install_kernels() {
    local extras_report="" build=(env)
    has_gpu || build=(env PIP_NO_CACHE_DIR=1 CAUSAL_CONV1D_FORCE_BUILD=TRUE CAUSAL_CONV1D_SKIP_CUDA_BUILD=TRUE
        MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE)
    optional liger_kernel "triton, liger-kernel" "${pip[@]}" -e "${root}[gpu]"
    if [[ "${GPU_EXTRAS:-1}" != 0 ]]; then
        optional causal_conv1d causal-conv1d "${build[@]}" "${pip[@]}" --no-deps causal-conv1d
        optional mamba_ssm mamba-ssm "${build[@]}" "${pip[@]}" --no-deps mamba-ssm
    fi
    echo "  $(has_gpu && echo GPU extras || echo Interpreted kernels): ${extras_report%, }"
}

say_torch() {
    local version cuda
    read -r version cuda < <("$venv/bin/python" -c 'import torch; print(torch.__version__, torch.version.cuda or "")')
    echo "  torch $version${cuda:+, for CUDA $cuda}"
    if has_gpu && [[ -z "$cuda" ]]; then
        echo "  There is an NVIDIA GPU, but pip found a torch without CUDA first: see its index and find-links settings." >&2
    fi
}

# Everybody's extras; those of the tests; on a GPU the low-precision formats as well.
extras_for() {
    echo "data$([[ "$1" == tests ]] && echo ,hf,test)$([[ "$1" == tests ]] || has_gpu && echo ,lowp)"
}

stands_where_it_was_made() { tr -d "'\"" 2> /dev/null < "$venv/bin/activate" | grep -qF "VIRTUAL_ENV=$venv"; }

install_venv() {
    local profile="$1" extras python
    is_current "$profile" && return # a start that waited for another finds everything done
    if [[ -e "$venv/unfinished" || ! -x "$venv/bin/python" ]] || ! stands_where_it_was_made; then
        python="$(find_python)" || exit 1
        rm -rf "$venv"
        "$python" -m venv "$venv"
    fi
    [[ -f "$venv/stamp-tests" ]] && profile=tests # what the tests have installed, a training run keeps up to date too
    extras="$(extras_for "$profile")"
    rm -f "$venv"/stamp-*
    touch "$venv/unfinished"
    echo "Setting up .venv with $("$venv/bin/python" -V); later starts reuse it."
    must "torch" torch hatchling editables
    must "titan_nemotron[$extras]" -e "${root}[$extras]"
    if has_gpu || [[ "$profile" == tests ]]; then install_kernels; fi
    say_torch
    rm -f "$venv/unfinished"
    stamp > "$venv/stamp-train"
    if [[ "$profile" == tests ]]; then stamp > "$venv/stamp-tests"; fi
}

setup_venv() {
    # The lock is held on a file that exists anyway, and that can be opened for writing as network file systems ask.
    is_current "$1" || (
        if command -v flock > /dev/null && ! flock -n 9; then
            echo "Another start is setting up .venv: waiting for it."
            flock 9
        fi
        install_venv "$1"
    ) 9<> "$root/pyproject.toml"
}
