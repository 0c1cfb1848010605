module cleat.test/prometheus-operator

go 1.26.0

// Only for the custom resource definitions in its example/prometheus-operator-crd.
require github.com/prometheus-operator/prometheus-operator v0.85.0
