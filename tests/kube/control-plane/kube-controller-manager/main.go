// kube-controller-manager, with an option for a setting that has none: how long its attach/detach controller waits before
// it detaches a volume by force from a node that is not ready. Six minutes are too long for a test.
// --test-forced-detach is that time, as Go writes a duration.
package main

import (
	"fmt"
	"os"
	"strings"
	"time"

	"k8s.io/component-base/cli"
	"k8s.io/kubernetes/cmd/kube-controller-manager/app"
	"k8s.io/kubernetes/pkg/controller/volume/attachdetach"
)

func main() {
	arguments := os.Args[:1]
	for _, argument := range os.Args[1:] {
		text, found := strings.CutPrefix(argument, "--test-forced-detach=")
		if !found {
			arguments = append(arguments, argument)
			continue
		}
		wait, err := time.ParseDuration(text)
		if err != nil {
			fmt.Fprintln(os.Stderr, argument+":", err)
			os.Exit(2)
		}
		attachdetach.DefaultTimerConfig.ReconcilerMaxWaitForUnmountDuration = wait
	}
	os.Args = arguments
	os.Exit(cli.Run(app.NewControllerManagerCommand()))
}
