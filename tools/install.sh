#!/bin/sh
# Install scforge, editable, into a virtual environment: sh tools/install.sh [GROUP [EXTRA]]
#
# GROUP is a dependency group of pyproject.toml (test, docs, dev); without one, scforge alone is installed.
# EXTRA is an extra that contradicts the others, so that it has versions of its own in constraints-EXTRA.txt.
# VENV names the environment (default .venv), PYTHON the interpreter to try first. A second call installs nothing.
set -eu

cd "$(dirname "$0")/.."
group=${1:-}
extra=${2:-}
constraints=constraints${extra:+-$extra}.txt
what=${group:-base}${extra:+,$extra}
venv=${VENV:-.venv}
stamp=$venv/scforge-installed

fail() {
    echo "$*" >&2
    exit 1
}

# The stamp is written last, so that an interrupted installation is taken up again. It holds one line a group, and
# the checkout's path, because an editable installation points there, and the newest tag, which names the version.
# Group dev contains the others.
state=$({ pwd; cat pyproject.toml "$constraints"; git describe --tags --abbrev=0 2>/dev/null || true; } | cksum)
if [ -x "$venv/bin/python" ] && "$venv/bin/python" -S -c '' 2>/dev/null; then
    if grep -qsxF "$state $what" "$stamp"; then
        exit 0
    elif [ -z "$extra" ] && grep -qsxE "$state ${group:-.*}|$state dev" "$stamp"; then
        exit 0
    fi
elif [ -e "$venv" ] && [ "$venv" != .venv ] && [ ! -e "$venv/pyvenv.cfg" ]; then
    fail "VENV=$venv is there but is no virtual environment: name another folder."
else
    rm -rf "$venv"
fi

uv=
if command -v uv >/dev/null 2>&1; then uv=uv; fi

# Candidates are run, not just looked up: a version manager's stand-in can be on the PATH and start nothing.
describe='import sys; print(*sys.version_info[:3], sys.executable)'
python='' newest='' newest_rank=0
for candidate in ${PYTHON:+"$PYTHON"} python3.14 python3.13 python3.12 python3 python; do
    found=$("$candidate" -c "$describe" 2>/dev/null) || continue
    major=${found%% *} rest=${found#* }
    minor=${rest%% *} rest=${rest#* }
    rank=$((major * 1000 + minor))
    if [ "$rank" -ge 3012 ]; then
        python=${rest#* }
        break
    elif [ "$rank" -gt "$newest_rank" ]; then
        newest_rank=$rank newest="$major.$minor.${rest%% *} ($candidate)"
    fi
done

if [ ! -e "$venv" ]; then
    if [ -n "$uv" ]; then
        # Where no Python is new enough, uv can bring one along.
        uv venv --quiet --python "${python:->=3.12}" "$venv" ||
            fail "uv found no Python 3.12 or newer and could not fetch one: install Python 3.12 and run this again."
    elif [ -n "$python" ]; then
        "$python" -m venv "$venv" >&2 ||
            fail "$python cannot make virtual environments: install its venv module (Debian: python3-venv) or uv."
    else
        fail "scforge needs Python 3.12 or newer and the newest found is ${newest:-none}:" \
            "install Python 3.12 or uv, or set PYTHON to a newer interpreter, and run this again."
    fi
fi

version=$("$venv/bin/python" -c 'import platform; print(platform.python_version())')
case $version in
2.* | 3.[0-9].* | 3.1[01].*)
    fail "The environment $venv has Python $version and scforge needs 3.12 or newer: remove it or set VENV."
    ;;
esac

echo "Installing scforge${extra:+[$extra]}${group:+ and its $group tools} into $venv (Python $version, ${uv:-pip}) ..."
if [ -n "$uv" ]; then
    uv pip install --quiet --python "$venv/bin/python" \
        -c "$constraints" ${group:+--group "$group"} -e ".${extra:+[$extra]}"
else
    # An environment that uv made has no pip; one that Python made may have a pip older than --group (25.1).
    # With -qq pip tells errors only.
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip >/dev/null
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check --upgrade 'pip>=25.1'
    "$venv/bin/python" -m pip install -qq \
        -c "$constraints" ${group:+--group "$group"} -e ".${extra:+[$extra]}"
fi

grep -sF "$state " "$stamp" >"$stamp.new" || true
echo "$state $what" >>"$stamp.new"
mv "$stamp.new" "$stamp"
