#!/usr/bin/env bash
# Keeps what cargo has compiled of the dependencies, so that a fresh clone on this machine does not compile them again.
#
#   scripts/cargo-deps.sh restore PROFILE   before cargo: fills an empty target/PROFILE from the cache
#   scripts/cargo-deps.sh save PROFILE      after cargo: adds to the cache what it does not have
#
# The cache has crates of registries only, because those of the workspace differ between clones. It is below
# CLEAT_CARGO_CACHE, or cleat/cargo in the user's cache directory, under a hash of the compiler and Cargo.lock. Large files are
# hard links where the file system permits it. What has not been used for 14 days is removed. cargo checks everything as
# usual, and compiles again what does not fit, for example after a change of a profile.

set -euo pipefail
cd "$(dirname "$0")/.."

[ $# = 2 ] || { sed -n '2,/^$/ s/^# \{0,1\}//p' "$0" >&2; exit 2; }
target=${CARGO_TARGET_DIR:-target}/$2
cache=${CLEAT_CARGO_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/cleat/cargo}
key=$({
    rustc -vV
    cat Cargo.lock
} | sha256sum | cut -c 1-24)
kept=$cache/$2-$key

# Copies the units of crates of registries that $2 does not have from $1.
copy() { # FROM TO
    local own unit name file
    local -A hashes=()
    local units=() builds=() files=()
    own=" $(cargo metadata --locked --offline --no-deps --format-version 1 |
        grep -oE '"name":"[a-z0-9-]+","version"' | cut -d '"' -f 4 | xargs) "
    for unit in "$1"/.fingerprint/*/; do
        unit=${unit%/}
        unit=${unit##*/}
        name=${unit%-*}
        case $own in *" $name "*) continue ;; esac
        [ ! -d "$2/.fingerprint/$unit" ] || continue
        hashes[${unit##*-}]=1
        units+=("$1/.fingerprint/$unit")
        [ ! -d "$1/build/$unit" ] || builds+=("$1/build/$unit")
    done
    [ "${#units[@]}" -gt 0 ] || return 0
    for file in "$1"/deps/*; do
        if [[ $file =~ -([0-9a-f]{16})\. ]] && [ -n "${hashes[${BASH_REMATCH[1]}]:-}" ]; then files+=("$file"); fi
    done
    mkdir -p "$2"/{.fingerprint,build,deps}
    # Build scripts may change their files in place, so these are copies.
    [ "${#builds[@]}" = 0 ] || printf '%s\0' "${builds[@]}" | xargs -0 cp -a --target-directory "$2/build"
    # A unit that only runs a build script has no file here.
    if [ "${#files[@]}" -gt 0 ]; then
        printf '%s\0' "${files[@]}" | xargs -0 cp -alf --target-directory "$2/deps" 2>/dev/null ||
            printf '%s\0' "${files[@]}" | xargs -0 cp -af --target-directory "$2/deps"
    fi
    # The last step: without these, cargo compiles the units.
    printf '%s\0' "${units[@]}" | xargs -0 cp -a --target-directory "$2/.fingerprint"
    echo "cargo-deps: $1 -> $2: ${#units[@]} units"
}

mkdir -p "$cache"
exec 9>"$cache/lock"
flock -w 300 9 || { echo "cargo-deps: another run uses $cache" >&2; exit 0; }
case $1 in
    restore)
        if [ -d "$target/.fingerprint" ]; then
            exit 0
        elif [ -d "$kept" ]; then
            copy "$kept" "$target"
        else
            echo "first run: the dependencies are compiled, and kept for other clones" # scripts/run-suites reads this
        fi
        ;;
    save)
        mkdir -p "$kept"
        copy "$target" "$kept"
        touch "$kept"
        find "$cache" -mindepth 1 -maxdepth 1 -type d -mtime +14 -exec rm -rf {} +
        ;;
    *) exit 2 ;;
esac
