// The same program with CSI 1.12, for callers that have not changed to 1.13.
module cleat.test/csi-wire

go 1.26.0

require (
	github.com/container-storage-interface/spec v1.12.0
	github.com/csi-addons/spec v0.2.1-0.20250610152019-b5a7205f6a79
	google.golang.org/protobuf v1.36.12-0.20260120151049-f2248ac996af
	k8s.io/kubelet v0.36.3
)

require (
	golang.org/x/net v0.55.0 // indirect
	golang.org/x/sys v0.45.0 // indirect
	golang.org/x/text v0.37.0 // indirect
	google.golang.org/genproto/googleapis/rpc v0.0.0-20260128011058-8636f8732409 // indirect
	google.golang.org/grpc v1.79.3 // indirect
)
