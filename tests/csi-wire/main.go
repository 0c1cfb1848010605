// Command csi-wire is the Go half of the test of the wire format; wire.rs is the other half.
//
// It has the Go bindings that the authors of CSI, kubelet and CSI-Addons publish, and does two things:
//
//   - It compares their descriptors with those of cleat: each message, field, enum, service and method must
//     exist on both sides, with the same name, number and type.
//   - It fills each message in several ways, writes it to standard output, reads from standard input what the
//     Rust half has decoded and encoded again, and compares the two.
//
// A frame on standard output is the name of a message and its bytes; a frame on standard input is the bytes. Before
// each name and before the bytes comes their length in 4 bytes, big endian. An empty name ends the exchange.
//
// Built with go-1.12.mod, the program speaks CSI 1.12. With -1.12 it accepts that cleat knows more, and does not know
// VolumeCondition, which 1.13 has removed.
package main

import (
	"flag"
	"fmt"
	"os"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/csi-addons/spec/lib/go/fence"
	"github.com/csi-addons/spec/lib/go/identity"
	"github.com/csi-addons/spec/lib/go/reclaimspace"
	"google.golang.org/protobuf/reflect/protoreflect"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

var published = []protoreflect.FileDescriptor{
	csi.File_csi_proto,
	fence.File_fence_fence_proto,
	identity.File_identity_identity_proto,
	reclaimspace.File_reclaimspace_reclaimspace_proto,
	registration.File_staging_src_k8s_io_kubelet_pkg_apis_pluginregistration_v1_api_proto,
}

// What CSI 1.13 has removed: a message, and a value of two enums.
var removed = []string{"csi.v1.VolumeCondition", "VOLUME_CONDITION"}

func main() {
	descriptors := flag.String("descriptors", "", "a file with the FileDescriptorSet of cleat")
	earlier := flag.Bool("1.12", false, "compare with CSI 1.12")
	flag.Parse()
	differences, err := run(*descriptors, *earlier)
	for _, difference := range differences {
		fmt.Fprintln(os.Stderr, difference)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "csi-wire:", err)
	}
	if err != nil || len(differences) > 0 {
		os.Exit(1)
	}
}

func run(descriptors string, earlier bool) ([]string, error) {
	differences, err := compareDescriptors(descriptors, earlier)
	if err != nil {
		return nil, err
	}
	failed, err := exchange(os.Stdin, os.Stdout)
	return append(differences, failed...), err
}
