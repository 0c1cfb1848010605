#!/usr/bin/env bash
# Builds Go programs of the tests once, and prints the directory that has the executables.
#
#   scripts/go-tool.sh DIRECTORY [ARGUMENT...]
#
#   DIRECTORY  has a go.mod and a go.sum, which pin all modules
#   ARGUMENT   goes to `go build`: options, and packages of that module or of modules that it
#              requires; without it, the package in DIRECTORY is built
#
# The executables are kept in a cache outside the source tree, under a hash of the Go files
# in DIRECTORY, the arguments and the version of Go: CLEAT_GO_CACHE, or cleat/go in the user's cache
# directory. What has not been used for 60 days is removed. Modules come from Go's module proxy.

set -euo pipefail

[ $# -ge 1 ] || { sed -n '2,/^$/ s/^# \{0,1\}//p' "$0" >&2; exit 2; }
directory=$(cd "$1" && pwd)
shift

command -v go >/dev/null || {
    echo "go is missing: run 'scripts/install-deps.sh test'" >&2
    exit 1
}
# Go fetches a later version of itself if the module requires one, also where a distribution has
# turned that off.
export GOTOOLCHAIN=${GOTOOLCHAIN:-auto}
export CGO_ENABLED=0 GOWORK=off

cd "$directory"
key=$({
    go env GOVERSION GOOS GOARCH
    printf '%s\n' "$@"
    find . -type f \( -name '*.go' -o -name '*.mod' -o -name '*.sum' \) | LC_ALL=C sort | xargs -d '\n' sha256sum
} | sha256sum | cut -c 1-24)
cache=${CLEAT_GO_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/cleat/go}
built=$cache/$(basename "$directory")-$key

mkdir -p "$cache"
exec 9>"$built.lock"
flock 9
if [ ! -d "$built" ]; then
    # scripts/run-suites reads this line: the build takes longer than the budget of the tests.
    echo "first run: builds $(basename "$directory")" >&2
    temporary=$built.tmp
    rm -rf "$temporary"
    mkdir "$temporary"
    go build -trimpath -buildvcs=false -ldflags=-s\ -w -o "$temporary/" "$@" >&2
    mv "$temporary" "$built"
    find "$cache" -mindepth 1 -maxdepth 1 ! -path "$built*" -mtime +60 -exec rm -rf {} +
fi
touch "$built" "$built.lock"
echo "$built"
