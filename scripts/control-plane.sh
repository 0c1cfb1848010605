#!/usr/bin/env bash
# Builds etcd and kube-apiserver for the tests once, and prints the directory that has the executables. Their
# modules are pinned in tests/kube/control-plane; scripts/go-tool.sh describes the cache.

set -euo pipefail
cd "$(dirname "$0")/.."

module=tests/kube/control-plane
# The version that Kubernetes' programs report is the one that go.mod requires.
version=$(awk '$1 == "k8s.io/kubernetes" { print $2 }' "$module/go.mod")
exec scripts/go-tool.sh "$module" "-ldflags=-s -w -X k8s.io/component-base/version.gitVersion=$version" \
    go.etcd.io/etcd/server/v3 k8s.io/kubernetes/cmd/kube-apiserver
