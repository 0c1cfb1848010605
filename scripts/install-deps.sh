#!/usr/bin/env bash
# Installs the packages that building and testing cleat needs on Debian 12. Installed
# packages are not changed.
#
#   scripts/install-deps.sh [--dry-run] GROUP...
#
#   build  compiler, linker, headers
#   test   NBD peers and tools of the native tests
#   vm     tools that build and boot the virtual machine of tests/vm
#
# Needs root, or sudo. Changes nothing when all packages are installed.

set -euo pipefail

lock_timeout_s=120

# One package per line: group, name, purpose.
table() {
    cat <<'TABLE'
build gcc                     links Rust programs
build libc6-dev               headers of the C library
build make                    runs the Makefile
build pkg-config              finds libraries
build libudev-dev             headers of libudev
test  btrfs-progs             file systems on test devices
test  ceph-common             ceph, rbd: set up the test cluster
test  ceph-mgr                the test cluster's statistics, for quotas
test  ceph-mon                the test cluster's monitor
test  ceph-osd                the test cluster's storage, in memory
test  cryptsetup-bin          encrypted volumes
test  e2fsprogs               file systems on test devices
test  fio                     load generator
test  golang-go               builds the Go programs of the tests
test  libnbd-bin              nbdinfo, nbdcopy, nbdsh: a peer
test  librados2               loaded by the rbd backend
test  librbd-dev              headers, to compare the declarations with
test  librbd1                 loaded by the rbd backend
test  mandoc                  checks the manual pages
test  mount                   mounts of test devices
test  nbd-client              a peer, and the oldest client of the kernel driver
test  nbdkit                  a peer
test  nbd-server              a peer of the benchmark
test  openssl                 certificates of the test control plane
test  python3                 test scripts
test  python3-libnbd          nbdsh's library
test  qemu-block-extra        qemu's rbd driver
test  qemu-utils              qemu-nbd, qemu-io, qemu-img: peers
test  radosgw                 the test cluster's object store, with the S3 API
test  shellcheck              checks the shell scripts
test  strace                  counts the system calls of the data path
test  systemd                 systemd-analyze verify
test  udev                    udevadm verify
test  util-linux              blkid, losetup, fstrim, fsfreeze
test  valgrind                finds leaks around librbd
test  xfsprogs                file systems on test devices
vm    busybox-static          programs of the initramfs
vm    cpio                    packs the initramfs
vm    debian-archive-keyring  verifies the image's packages
vm    e2fsprogs               mke2fs and debugfs: disks without mounting
vm    fakeroot                builds the image without being root
vm    kmod                    finds the drivers of the initramfs
vm    mmdebstrap              builds the root file system
vm    procps                  the harness's own test
vm    python3                 tests/vm/run
vm    qemu-system-x86         the virtual machine
vm    uidmap                  builds the image without being root
vm    util-linux              flock
vm    xz-utils                unpacks kernel modules
TABLE
}

say() { echo "install-deps: $*"; }

usage() {
    sed -n '2,/^$/ s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

privileged() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

# Waits for another apt, such as the one that looks for updates after a boot. apt-get's own option for that
# does not cover all of its locks.
apt_get() {
    local messages waited_s=0
    until messages=$(privileged env LC_ALL=C DEBIAN_FRONTEND=noninteractive \
        apt-get -q -q -o Dpkg::Use-Pty=0 "$@" 2>&1 >&3); do
        case $messages in *"Could not get lock"*) ;; *) waited_s=$lock_timeout_s ;; esac
        if [ "$waited_s" -ge "$lock_timeout_s" ]; then
            echo "$messages" >&2
            return 1
        fi
        [ "$waited_s" != 0 ] || say "waits up to $lock_timeout_s s: ${messages%%$'\n'*}" >&2
        sleep 2
        waited_s=$((waited_s + 2))
    done 3>&1
    [ -z "$messages" ] || echo "$messages" >&2
}

install() { # OPTIONS AND PACKAGES: shows only errors of dpkg
    local output=/dev/null
    [ -z "$dry_run" ] || output=/dev/stdout
    apt_get -y $dry_run --no-install-recommends install "$@" >"$output"
}

installed_version() { # PACKAGE: empty when it is not installed
    dpkg-query -W -f '${db:Status-Status} ${Version}\n' "$1" 2>/dev/null | sed -n 's/^installed //p'
}

check_rust() {
    command -v cargo >/dev/null && return
    cat <<'TEXT'
install-deps: cargo is missing, and Debian's is too old. Install Rust with rustup:
    curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh
TEXT
    return 1
}

# All packages of QEMU must have the same version. If one is installed from backports, the
# others must come from there too.
from_backports() {
    local package
    for package in qemu-utils qemu-system-x86 qemu-system-common qemu-block-extra; do
        case $(installed_version "$package") in *~bpo*) return 0 ;; esac
    done
    return 1
}

# Debian 12 has Go 1.19. From 1.21 on, Go fetches the version that a module requires.
has_go() {
    local version
    version=$(go env GOVERSION 2>/dev/null | sed -n 's/^go1\.\([0-9]*\).*/\1/p')
    [ "${version:-0}" -ge 21 ]
}

# Sets backports_options: options with which apt knows the backports suite. If apt's
# sources do not contain it, a copy of them does, for this run only.
backports_options=()
temporary=
trap '[ -z "$temporary" ] || rm -rf "$temporary"' EXIT
know_backports() {
    local codename mirror
    # shellcheck source=/dev/null
    codename=$(. /etc/os-release && echo "$VERSION_CODENAME")
    backports_options=(-t "$codename-backports")
    # shellcheck disable=SC2016 # $(...) is apt's own syntax
    if apt-get indextargets --format '$(RELEASE)' 'Created-By: Packages' | grep -qx "$codename-backports"; then
        return
    fi
    # shellcheck disable=SC2016
    mirror=$(apt-get indextargets --format '$(RELEASE) $(COMPONENT) $(REPO_URI)' 'Created-By: Packages' |
        sed -n "s/^$codename main //p" | head -n 1)
    [ -n "$mirror" ] || mirror=http://deb.debian.org/debian
    temporary=$(mktemp -d)
    chmod 755 "$temporary"
    [ ! -d /etc/apt/sources.list.d ] || cp /etc/apt/sources.list.d/* "$temporary/" 2>/dev/null || true
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $codename-backports main" \
        >"$temporary/cleat-backports.list"
    backports_options+=(-o "Dir::Etc::sourceparts=$temporary")
    say "apt gets $codename-backports for this run: some packages are installed from there"
    apt_get update "${backports_options[@]:2}"
}

dry_run=
groups=()
for argument in "$@"; do
    case $argument in
        --dry-run) dry_run=--simulate ;;
        build | test | vm) groups+=("$argument") ;;
        *) usage ;;
    esac
done
[ "${#groups[@]}" -gt 0 ] || usage

wanted=$(table | grep -E "^($(IFS='|' && echo "${groups[*]}")) ")
# shellcheck disable=SC2016 # ${...} is dpkg-query's own syntax
present=$(awk '{ print $2 }' <<<"$wanted" |
    xargs dpkg-query -W -f '${db:Status-Status} ${Package}\n' 2>/dev/null | sed -n 's/^installed //p' || true)

stock=() backports=()
while read -r group package reason; do
    case $package in
        golang-go) has_go && continue ;; # not every Go comes from Debian
        *) grep -qx "$package" <<<"$present" && continue ;;
    esac
    case " ${stock[*]} ${backports[*]} " in *" $package "*) continue ;; esac # it is in two groups
    say "$group needs $package: $reason"
    if [ "$package" = golang-go ] || { [[ $package = qemu-* ]] && from_backports; }; then
        backports+=("$package")
    else
        stock+=("$package")
    fi
done <<<"$wanted"

if [ "${#stock[@]}" -gt 0 ] || [ "${#backports[@]}" -gt 0 ]; then
    [ "$(id -u)" = 0 ] || command -v sudo >/dev/null || { say "run this as root, or install sudo" >&2; exit 1; }
    apt_get update
    if [ "${#backports[@]}" -gt 0 ]; then
        know_backports
        install "${backports_options[@]}" "${backports[@]}"
    fi
    if [ "${#stock[@]}" -gt 0 ]; then
        install "${stock[@]}"
    fi
    [ -n "$dry_run" ] || say "${groups[*]}: installed"
else
    say "${groups[*]}: all installed"
fi

case " ${groups[*]} " in *" build "*) check_rust ;; esac
