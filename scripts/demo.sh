#!/usr/bin/env bash
# Shows what cleat does: it maps a volume to a block device, puts a file system with a real file tree on
# it, unmaps it, maps it again, and compares every byte.
#
#   scripts/demo.sh PATH/TO/cleat
#
# Runs on this machine if possible (as root, with the nbd module), otherwise in a virtual machine. Cleans
# up in any case.
# The printed commands are those that a user would type, without expansion.
# shellcheck disable=SC2016
set -euo pipefail

project=$(cd "$(dirname "$0")/.." && pwd)

fail() {
    echo "demo: $*" >&2
    exit 1
}

# --- The demonstration -----------------------------------------------------------------------------

step() { # TITLE
    printf '\n== %s\n' "$1"
}

show() { # COMMAND...: prints the command as a user would type it, and runs it
    printf '$ %s\n' "$*"
    "$@"
}

checksums() { # DIRECTORY: prints one checksum of all names and contents of the tree
    (cd "$1" && find . -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -d ' ' -f 1)
}

run_here() { # TREE
    local tree=$1
    # Not local: the trap uses them after this function has returned.
    work='' node_pid='' device='' mounted=''
    work=$(mktemp -d /tmp/cleat-demo.XXXXXX)
    export CLEAT_SOCKET=$work/cleat.sock

    # shellcheck disable=SC2317 # called by the trap
    clean_up() {
        trap - EXIT
        [ -z "$mounted" ] || umount "$work/mnt" 2>/dev/null || umount -l "$work/mnt" || true
        if [ -n "$node_pid" ]; then
            cleat unmap demo >/dev/null 2>&1 || cleat unmap demo --force >/dev/null 2>&1 || true
            kill "$node_pid" 2>/dev/null || true
            wait "$node_pid" 2>/dev/null || true
        fi
        rm -f /run/udev/rules.d/60-cleat.rules
        [ ! -x "$(command -v udevadm)" ] || udevadm control --reload 2>/dev/null || true
        rm -rf "$work"
    }
    trap clean_up EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM

    mkdir -p "$work/mnt" /run/udev/rules.d
    [ -e /usr/lib/udev/rules.d/60-cleat.rules ] || [ -e /usr/local/lib/udev/rules.d/60-cleat.rules ] ||
        { cp "$rules" /run/udev/rules.d/60-cleat.rules && udevadm control --reload; }

    step "Start the daemon"
    printf '$ cleat node &\n'
    cleat node --state-dir "$work/state" >"$work/node.log" 2>&1 &
    node_pid=$!
    local waited_ms=0
    until cleat status >/dev/null 2>&1; do
        kill -0 "$node_pid" 2>/dev/null || { cat "$work/node.log" >&2; fail "the daemon ended"; }
        [ "$waited_ms" -lt 20000 ] || { cat "$work/node.log" >&2; fail "the daemon does not answer"; }
        sleep 0.1
        waited_ms=$((waited_ms + 100))
    done

    step "Map a file to a block device"
    local uri="file:$work/volume.img?create=96M"
    printf '$ device=$(cleat map "%s" --name demo)\n' "$uri"
    device=$(cleat map "$uri" --name demo)
    printf '$ echo $device\n%s\n' "$device"
    show ls -l /dev/disk/by-id/cleat-demo

    step "Put a file system and a real file tree on it"
    show mkfs.ext4 -q "$device"
    show mount "$device" "$work/mnt"
    mounted=yes
    show cp -a "$tree" "$work/mnt/tree"
    local before
    before=$(checksums "$work/mnt/tree")
    printf '%s files, sha256 of all: %s\n' "$(find "$work/mnt/tree" -type f | wc -l)" "$before"
    [ "$before" = "$(checksums "$tree")" ] || fail "the copy differs from the original"
    show cleat ls

    step "A mounted device is not unmapped"
    printf '$ cleat unmap demo\n'
    if cleat unmap demo; then fail "a mounted device was unmapped"; fi

    step "Unmount and unmap"
    show umount "$work/mnt"
    mounted=
    show cleat unmap demo
    [ ! -e /dev/disk/by-id/cleat-demo ] || fail "the symlink is still there"

    step "Map it again and compare"
    printf '$ device=$(cleat map "%s" --name demo)\n' "file:$work/volume.img"
    device=$(cleat map "file:$work/volume.img" --name demo)
    show fsck.ext4 -fn "$device"
    show mount -o ro "$device" "$work/mnt"
    mounted=yes
    local after
    after=$(checksums "$work/mnt/tree")
    printf 'sha256 of all: %s\n' "$after"
    [ "$before" = "$after" ] || fail "the file tree has changed"
    show cleat stats demo --total
    show umount "$work/mnt"
    mounted=
    show cleat unmap demo

    printf '\nEvery byte is there.\n'
}

# --- Where it runs -----------------------------------------------------------------------------

can_run_here() {
    [ "$(id -u)" = 0 ] || return 1
    # Without a running udev, or with a tmpfs over /dev, no symlink would appear.
    [ -S /run/udev/control ] && command -v mkfs.ext4 >/dev/null || return 1
    [ -d /sys/module/nbd ] || modprobe nbd 2>/dev/null
}

run_in_vm() { # BINARY
    local payload started_s=$SECONDS
    "$project/scripts/install-deps.sh" vm
    payload=$(mktemp -d)
    # shellcheck disable=SC2064 # expand the name now
    trap "rm -rf '$payload'" EXIT
    mkdir "$payload/tree"
    # Without debug information, which is four fifths of the file.
    strip -o "$payload/cleat" "$1" 2>/dev/null || cp "$1" "$payload/cleat"
    cp "$0" "$payload/demo.sh"
    cp "$rules" "$payload/"
    fill_tree "$payload/tree"
    "$project/tests/vm/run" --image demo --nbds-max 2 --payload "$payload" --timeout 600 \
        --env "DEMO_STARTED=$(($(date +%s) - SECONDS + started_s))" -- ./demo.sh --inside
    echo "(in the virtual machine; $((SECONDS - started_s)) s with its start)"
}

# Copies the project's own sources.
fill_tree() { # DIRECTORY
    (cd "$project" && cp -a src tests scripts proto Cargo.toml Cargo.lock "$1")
}

# Prints three commands for this machine. They run in the project's directory.
what_next() { # BINARY
    local sudo='sudo '
    [ "$(id -u)" != 0 ] || sudo=
    printf '\n== What to type next, in %s\n' "$project"
    if has_nbd; then
        cat <<TEXT
Install a build of the release, and check this machine:
\$ make && ${sudo}make install && ${sudo}cleat doctor
TEXT
        if [ -d /run/systemd/system ]; then
            cat <<TEXT
Start the daemon, and map a volume of your own:
\$ ${sudo}systemctl enable --now cleat && ${sudo}cleat map 'file:/var/tmp/a.img?create=1G' --name data
TEXT
        else
            cat <<TEXT
Start the daemon, to map volumes of your own from another terminal:
\$ ${sudo}cleat node
TEXT
        fi
    else
        cat <<TEXT
Serve a volume to NBD clients, without root and without the nbd module, until Ctrl-C:
\$ $1 serve mem:64M --socket /tmp/a.sock
List what this machine lacks for block devices, with a repair for each:
\$ $1 doctor
TEXT
    fi
    cat <<TEXT
Read what a volume can be, with examples:
\$ $1 map --help
TEXT
}

has_nbd() {
    [ -d /sys/module/nbd ] || PATH=$PATH:/usr/sbin:/sbin modprobe -n -q nbd 2>/dev/null
}

if [ "${1:-}" = --inside ]; then
    PATH=$PWD:$PATH
    rules=$PWD/60-cleat.rules
    echo "(up after $(($(date +%s) - DEMO_STARTED)) s)"
    run_here "$PWD/tree"
    exit
fi

if [ $# != 1 ] || [ ! -x "$1" ]; then
    fail "usage: scripts/demo.sh PATH/TO/cleat (make demo builds it)"
fi
rules=$project/systemd/60-cleat.rules
binary=$(realpath "$1")
if can_run_here; then
    echo "demo: on this machine: it has the nbd module, and the user is root"
    tree=$(mktemp -d)
    fill_tree "$tree"
    PATH=$(dirname "$binary"):$PATH
    status=0
    (run_here "$tree") || status=$?
    rm -rf "$tree"
    [ "$status" != 0 ] || what_next "$1"
    exit "$status"
fi
echo "demo: in a virtual machine: this machine has no nbd module, or the user is not root"
run_in_vm "$binary"
what_next "$1"
