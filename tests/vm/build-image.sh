#!/usr/bin/env bash
# Builds the image that tests/vm/run boots, under cleat/vm in the user's cache directory (or
# $CLEAT_VM_DIR), and prints its directory:
#
#   vmlinuz  initrd.img  root.ext4  release
#
# KERNEL=6.12 (default) or 6.1 selects Debian's cloud kernel of that series. IMAGE=full (default)
# or demo selects the packages: packages.txt or packages-demo.txt.
#
# There are four stages. Each result is cached under a hash of its inputs, so that a second
# run does nothing and a change of the guest's scripts takes less than a second:
#
#   base-HASH      the Debian root file system as a tar       (mmdebstrap; demo: see build_demo_base)
#   kernel-HASH    the package of the kernel
#   image-HASH     kernel, and base plus modules as an image  (mke2fs -d)
#   boot-HASH      the initramfs with the guest's scripts, and links to the image
#
# REFRESH=1 rebuilds all stages, with the current packages of Debian.
# Runs as root or, more slowly, as another user (fakeroot, user namespaces).

set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${CLEAT_VM_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/cleat/vm}
series=${KERNEL:-6.12}
kind=${IMAGE:-full}
suite=bookworm

keep_days=3

# The drivers in the initramfs: those for the root disk and the ports to the host.
initramfs_modules=(virtio_pci virtio_blk virtio_console)
# Files that no test reads. hwdb.d has the names of PCI and USB vendors, which udev rules for block devices
# do not use. A pattern matches the path in the package, which may begin with /lib or with /usr/lib.
unused=(/usr/share/{doc,info,locale,man,lintian,bug,bash-completion,zoneinfo,perl/5.36.0/unicore}'/*'
    {,/usr}'/lib/udev/hwdb.d/*')

say() { echo "build-image: $*" >&2; }

die() {
    say "$*"
    exit 1
}

hash_of() { sha256sum | cut -c 1-12; }

packages() { sed 's/#.*//' "$package_list" | xargs; }

# mke2fs and tar must see root as the owner of files.
as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else fakeroot -- "$@"; fi
}

# A stage leaves a complete directory or none: it builds in $1.tmp and renames that.
stage() { # DIRECTORY FUNCTION
    [ -d "$1" ] && return
    local temporary=$1.tmp.$$ start=$SECONDS
    mkdir "$temporary"
    # shellcheck disable=SC2064 # expand now: the name changes with each stage
    trap "rm -rf '$temporary'" EXIT
    "$2" "$temporary" >&2 # standard output is only for the result
    mv "$temporary" "$1"
    say "made ${1##*/} in $((SECONDS - start)) s"
}

build_base() { # DIRECTORY
    say "root file system: Debian with $(packages)"
    "build_${kind}_base" "$1"
}

build_full_base() { # DIRECTORY
    # Not --dpkgopt: with that, mmdebstrap unpacks each essential package through a filter in Python, which takes
    # a fifth of the processor time.
    printf 'path-exclude=%s\n' "${unused[@]}" >"$1/cleat-vm"
    echo force-unsafe-io >>"$1/cleat-vm"
    # shellcheck disable=SC2016 # "$1" is for mmdebstrap's shell
    mmdebstrap --quiet --variant=essential --include="$(packages)" \
        --extract-hook="copy-in $1/cleat-vm /etc/dpkg/dpkg.cfg.d" \
        --aptopt='APT::Install-Recommends "false"' \
        --customize-hook='cd "$1" && rm -rf '"${unused[*]/#/.}" \
        --customize-hook="$here/customize-root"' "$1"' \
        "$suite" "$1/root.tar"
}

# Unpacks the packages and their dependencies without installing them, which takes seconds and not minutes.
# No script of a package runs, so there are no alternatives, no users and no caches. apt's package lists
# are those of the host.
build_demo_base() { # DIRECTORY
    mkdir -p "$1/archives/partial" "$1/root"
    # shellcheck disable=SC2046 # one word per package
    apt-get -y -qq --no-install-recommends --download-only -o Dir::State::status=/dev/null \
        -o Dir::Cache::archives="$1/archives" -o Debug::NoLocking=true -o APT::Sandbox::User=root \
        install $(packages)
    # shellcheck disable=SC2016 # expanded by the inner shell
    as_root bash -euo pipefail -c '
        cd "$1"
        mkdir -p root/usr/{bin,sbin,lib,lib64}
        ln -s usr/{bin,sbin,lib,lib64} root/
        for package in archives/*.deb; do
            dpkg-deb --fsys-tarfile "$package" |
                tar -xp -C root --keep-directory-symlink --warning=no-timestamp "${@:3}"
        done
        "$2/customize-root" root
        tar -cf root.tar -C root .
        rm -r root archives
    ' build "$1" "$here" "${unused[@]/#/--exclude=.}" \
        --exclude='./usr/lib/*/gconv/*'
}

newest_kernel() { # prints the package of the series with the highest version
    apt-cache search --names-only "^linux-image-${series//./\\.}\\.[0-9].*-cloud-amd64-unsigned\$" |
        cut -d ' ' -f 1 | sort -V | tail -n 1
}

build_kernel() { # DIRECTORY
    local package
    package=$(newest_kernel)
    [ -n "$package" ] || die "apt knows no cloud kernel $series: run 'apt-get update'," \
        "and check that apt's sources contain the $suite-security suite"
    say "kernel: $package"
    (cd "$1" && apt-get -qq -o APT::Sandbox::User=root download "$package")
}

build_image() { # DIRECTORY
    local unpacked=$1/unpacked release modules excluded
    # Three quarters of the size are drivers for hardware that the VM does not have.
    excluded=(drivers/{infiniband,iommu,gpu,input,media,net/ethernet,nvme,platform,'scsi/[a-l]*',usb,vdpa,video})
    # The demo needs only those of block devices.
    [ "$kind" != demo ] || excluded=('[!d]*' 'drivers/[!b]*')
    mkdir "$unpacked"
    dpkg-deb --fsys-tarfile "$kernel"/*.deb | tar -x -C "$unpacked" ./boot ./lib \
        "${excluded[@]/#/--exclude=./lib/modules/*/kernel/}"

    release=$(ls "$unpacked/lib/modules")
    echo "$release" >"$1/release"
    modules=$unpacked/lib/modules/$release
    # Decompress once here, and not at each modprobe under emulation. Those of 6.1 are not compressed.
    find "$modules" -name '*.ko.xz' -print0 | xargs -0 -r -n 64 -P "$(nproc)" xz -d
    depmod -b "$unpacked" "$release"
    mv "$unpacked/boot/vmlinuz-$release" "$1/vmlinuz"
    mv "$unpacked/boot/config-$release" "$1/config"
    mkdir "$1/modules"
    mv "$unpacked/lib" "$1/modules/"

    # shellcheck disable=SC2016 # expanded by the inner shell
    as_root bash -euc '
        mkdir "$1/root"
        tar -xpf "$2" -C "$1/root" --exclude="./dev/*"
        cp -a "$1/modules/lib/modules" "$1/root/usr/lib/"
        # Free space for files of the tests; the image is sparse.
        size=$(($(du -sm "$1/root" | cut -f 1) + 512))
        mke2fs -q -t ext4 -O ^has_journal -E root_owner=0:0 -m 0 -L cleat-root \
            -d "$1/root" "$1/root.ext4" "${size}M"
    ' build "$1" "$base/root.tar"
    rm -rf "$1/root" "$unpacked"
}

build_boot() { # DIRECTORY
    local tree=$1/tree release path number=10
    release=$(cat "$image/release")
    mkdir -p "$tree"/{bin,modules}
    cp /bin/busybox "$tree/bin/"
    cp "$here/guest/initramfs-init" "$tree/init"
    cp -a "$here/guest" "$tree/cleat"
    modprobe -d "$image/modules" -S "$release" -a --show-depends "${initramfs_modules[@]}" |
        awk '$1 == "insmod" && !seen[$2]++ { print $2 }' |
        while read -r path; do
            cp "$path" "$tree/modules/$number-${path##*/}"
            number=$((number + 1))
        done
    (cd "$tree" && find . | cpio --quiet -o -H newc -R 0:0) >"$1/initrd.img"
    rm -r "$tree"
    ln -s "../${image##*/}"/{vmlinuz,root.ext4,release,config} "$1/"
}

mkdir -p "$cache"
cache=$(cd "$cache" && pwd)
# Parallel test runs must not build twice.
exec 9>"$cache/lock"
flock 9

case ${REFRESH:-0} in 0) ;; *) rm -rf "$cache"/{base,kernel,image,boot}-* ;; esac

case $kind in
    full) package_list=$here/packages.txt ;;
    demo) package_list=$here/packages-demo.txt ;;
    *) die "IMAGE=$kind: it is full or demo" ;;
esac
base=$cache/base-$({ packages; cat "${BASH_SOURCE[0]}" "$here/customize-root"; } | hash_of)
kernel=$cache/kernel-$series-$(hash_of <"${BASH_SOURCE[0]}")
image=$cache/image-$series-$(echo "${base##*/}" | hash_of)
boot=$cache/boot-$series-$({ echo "${image##*/}"; find "$here/guest" -type f | LC_ALL=C sort | xargs cat; } | hash_of)

if [ ! -d "$boot" ]; then
    missing=()
    for tool in mmdebstrap mke2fs cpio modprobe depmod xz apt-get dpkg-deb; do
        PATH=$PATH:/usr/sbin:/sbin command -v "$tool" >/dev/null || missing+=("$tool")
    done
    [ -x /bin/busybox ] || missing+=(busybox)
    [ "${#missing[@]}" = 0 ] || die "missing: ${missing[*]}; run scripts/install-deps.sh vm"
    export PATH=$PATH:/usr/sbin:/sbin

    if [ ! -d "$image" ]; then
        echo "first run: the image is built" >&2 # scripts/run-suites reads this
        # Both mostly wait for the network.
        (stage "$kernel" build_kernel) &
        fetched=$!
        (stage "$base" build_base)
        wait "$fetched"
    fi
    stage "$image" build_image
    stage "$boot" build_boot
fi

# Worktrees with other versions of these files may share the cache, and a VM may be about to
# start from any image, so only images without use for days are removed. Incomplete stages
# are removed at once: this script holds the lock, so their builder is dead.
for used in "$base" "$kernel" "$image" "$boot"; do
    [ ! -d "$used" ] || touch "$used"
done
find "$cache" -mindepth 1 -maxdepth 1 -name '*-*.tmp.*' -exec rm -rf {} +
find "$cache" -mindepth 1 -maxdepth 1 \( -name 'base-*' -o -name 'kernel-*' -o -name 'image-*' -o -name 'boot-*' \) \
    -mtime "+$keep_days" -exec rm -rf {} +
echo "$boot"
