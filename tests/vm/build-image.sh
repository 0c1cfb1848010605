#!/usr/bin/env bash
# Builds the image that tests/vm/run boots, under target/vm (or $CLEAT_VM_DIR), and prints
# its directory:
#
#   vmlinuz  initrd.img  root.ext4  release
#
# KERNEL=6.12 (default) or 6.1 selects Debian's cloud kernel of that series.
#
# There are three stages. Each result is cached under a hash of its inputs, so that a second
# run does nothing and a change of the guest's scripts takes less than a second:
#
#   base-HASH      the Debian root file system as a tar       (mmdebstrap)
#   image-HASH     kernel, and base plus modules as an image  (mke2fs -d)
#   boot-HASH      the initramfs with the guest's scripts, and links to the image
#
# REFRESH=1 rebuilds all stages, with the current packages of Debian.
# Runs as root or, more slowly, as another user (fakeroot, user namespaces).

set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${CLEAT_VM_DIR:-$here/../../target/vm}
series=${KERNEL:-6.12}
suite=bookworm

keep_days=3

# The drivers in the initramfs: those for the root disk and the ports to the host.
initramfs_modules=(virtio_pci virtio_blk virtio_console)

say() { echo "build-image: $*" >&2; }

die() {
    say "$*"
    exit 1
}

hash_of() { sha256sum | cut -c 1-12; }

packages() { sed 's/#.*//' "$here/packages.txt" | xargs | tr ' ' ,; }

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
    say "root file system: Debian $suite with $(packages)"
    local exclude options=()
    for exclude in doc info locale man lintian bug bash-completion zoneinfo perl/5.36.0/unicore; do
        options+=("--dpkgopt=path-exclude=/usr/share/$exclude/*")
    done
    # The names of PCI and USB vendors, which udev rules for block devices do not use.
    options+=("--dpkgopt=path-exclude=/usr/lib/udev/hwdb.d/*")
    # shellcheck disable=SC2016 # "$1" is for mmdebstrap's shell
    mmdebstrap --quiet --variant=essential --include="$(packages)" "${options[@]}" \
        --aptopt='APT::Install-Recommends "false"' \
        --customize-hook="$here/customize-root"' "$1"' \
        "$suite" "$1/root.tar"
}

newest_kernel() { # prints the package of the series with the highest version
    apt-cache search --names-only "^linux-image-${series//./\\.}\\.[0-9].*-cloud-amd64-unsigned\$" |
        cut -d ' ' -f 1 | sort -V | tail -n 1
}

build_image() { # DIRECTORY
    local package unpacked=$1/unpacked release modules
    package=$(newest_kernel)
    [ -n "$package" ] || die "apt knows no cloud kernel $series: run 'apt-get update'," \
        "and check that apt's sources contain the $suite-security suite"
    say "kernel: $package"
    (cd "$1" && apt-get -qq -o APT::Sandbox::User=root download "$package")
    dpkg-deb -x "$1/$package"_*.deb "$unpacked"
    rm "$1"/*.deb

    release=$(ls "$unpacked/lib/modules")
    echo "$release" >"$1/release"
    modules=$unpacked/lib/modules/$release
    # Three quarters of the size are drivers for hardware that the VM does not have.
    rm -rf "$modules"/kernel/drivers/{infiniband,iommu,gpu,input,media,net/ethernet,nvme,platform,scsi/[a-l]*,usb,vdpa,video}
    # Decompress once here, and not at each modprobe under emulation.
    find "$modules" -name '*.ko.xz' -exec xz -d {} +
    depmod -b "$unpacked" "$release"
    mv "$unpacked/boot/vmlinuz-$release" "$1/vmlinuz"
    mv "$unpacked/boot/config-$release" "$1/config"
    mkdir "$1/modules"
    cp -a "$unpacked/lib" "$1/modules/"

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

case ${REFRESH:-0} in 0) ;; *) rm -rf "$cache"/{base,image,boot}-* ;; esac

base=$cache/base-$({ packages; cat "${BASH_SOURCE[0]}" "$here/customize-root"; } | hash_of)
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

    [ -d "$image" ] || stage "$base" build_base
    stage "$image" build_image
    stage "$boot" build_boot
fi

# Worktrees with other versions of these files may share the cache, and a VM may be about to
# start from any image, so only images without use for days are removed. Incomplete stages
# are removed at once: this script holds the lock, so their builder is dead.
for used in "$base" "$image" "$boot"; do
    [ ! -d "$used" ] || touch "$used"
done
find "$cache" -mindepth 1 -maxdepth 1 -name '*-*.tmp.*' -exec rm -rf {} +
find "$cache" -mindepth 1 -maxdepth 1 \( -name 'base-*' -o -name 'image-*' -o -name 'boot-*' \) \
    -mtime "+$keep_days" -exec rm -rf {} +
echo "$boot"
