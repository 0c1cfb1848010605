#!/usr/bin/env bash
# Builds helm and kustomize for the tests of deploy/ once, and prints the directory that has the executables. Their
# modules are pinned in tests/kube/helm; scripts/go-tool.sh describes the cache.

set -euo pipefail
cd "$(dirname "$0")/.."

module=tests/kube/helm
# The version of Kubernetes for which charts are rendered without a cluster, as helm's own Makefile sets it: v0.MINOR.PATCH
# of client-go belongs to Kubernetes 1.MINOR.
minor=$(awk '$1 == "k8s.io/client-go" { split($2, version, "."); print version[2] }' "$module/go.mod")
flags="-s -w"
for package in chartutil lint/rules; do
    flags+=" -X helm.sh/helm/v3/pkg/$package.k8sVersionMajor=1 -X helm.sh/helm/v3/pkg/$package.k8sVersionMinor=$minor"
done
exec scripts/go-tool.sh "$module" "-ldflags=$flags" helm.sh/helm/v3/cmd/helm sigs.k8s.io/kustomize/kustomize/v5
