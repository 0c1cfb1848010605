#!/usr/bin/env bash
# Builds programs of Kubernetes for the tests once, and prints the directory that has the executables. Their modules are
# pinned in tests/kube/control-plane and tests/nodes/containerd; scripts/go-tool.sh describes the cache.
#
#   scripts/control-plane.sh              etcd, the control plane, and the sidecars of CSI
#   scripts/control-plane.sh node         kubelet and kubectl
#   scripts/control-plane.sh containerd   containerd, its shim, and ctr

set -euo pipefail
cd "$(dirname "$0")/.."

module=tests/kube/control-plane
# The version that Kubernetes' programs report is the one that go.mod requires.
version=$(awk '$1 == "k8s.io/kubernetes" { print $2 }' "$module/go.mod")
kubernetes=k8s.io/kubernetes/cmd
csi=github.com/kubernetes-csi
case ${1:-} in
    '') programs=(
        go.etcd.io/etcd/server/v3
        "$kubernetes"/kube-apiserver ./kube-controller-manager "$kubernetes"/kube-scheduler
        "$csi"/external-attacher/v4/cmd/csi-attacher
        "$csi"/external-provisioner/v6/cmd/csi-provisioner
        "$csi"/external-resizer/v2/cmd/csi-resizer
        "$csi"/external-snapshotter/v8/cmd/csi-snapshotter
        "$csi"/external-snapshotter/v8/cmd/snapshot-controller
    ) ;;
    containerd)
        exec scripts/go-tool.sh tests/nodes/containerd \
            github.com/containerd/containerd/v2/cmd/{containerd,containerd-shim-runc-v2,ctr}
        ;;
    node) programs=("$kubernetes"/kubelet "$kubernetes"/kubectl) ;;
    *) sed -n '2,/^$/ s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
exec scripts/go-tool.sh "$module" "-ldflags=-s -w -X k8s.io/component-base/version.gitVersion=$version" "${programs[@]}"
