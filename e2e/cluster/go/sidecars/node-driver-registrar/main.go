// A stand-in for csi-node-driver-registrar: the same flags, the same calls to kubelet and to the driver.
//
// The suite builds stock sidecars where the Go module proxy has them. It does not have this one (its module path lacks the /v2
// that its tags ask for), so the suite's cluster runs these lines under the stock image's name. A user's cluster pulls the stock image.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

type server struct {
	driver, endpoint string
}

// GetInfo is how kubelet learns which driver this is and where its socket lies.
func (s server) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	log.Printf("kubelet asks for %s", s.driver)
	return &registration.PluginInfo{Type: registration.CSIPlugin, Name: s.driver, Endpoint: s.endpoint,
		SupportedVersions: []string{"1.0.0"}}, nil
}

// NotifyRegistrationStatus tells the verdict; after a refusal the container is restarted, as the stock one is.
func (s server) NotifyRegistrationStatus(_ context.Context, status *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	log.Printf("kubelet: registered=%v %s", status.PluginRegistered, status.Error)
	if !status.PluginRegistered {
		os.Exit(1)
	}
	return &registration.RegistrationStatusResponse{}, nil
}

func main() {
	address := flag.String("csi-address", "/run/csi/socket", "the driver's socket as this container sees it")
	endpoint := flag.String("kubelet-registration-path", "", "the driver's socket as kubelet sees it")
	directory := flag.String("plugin-registration-path", "/registration", "where kubelet looks for new plugins")
	health := flag.String("http-endpoint", "", "where to answer /healthz")
	timeout := flag.Duration("timeout", time.Second, "for one call to the driver")
	flag.Duration("connection-timeout", 0, "ignored, as the stock one does")
	flag.String("mode", "registration", "accepted for the stock flag's sake")
	flag.Int("v", 0, "accepted for the stock flag's sake")
	flag.Parse()

	driver := name(*address, *timeout)
	socket := filepath.Join(*directory, driver+"-reg.sock")
	if err := os.Remove(socket); err != nil && !os.IsNotExist(err) {
		log.Fatal(err)
	}
	syscall.Umask(0o077)
	listener, err := net.Listen("unix", socket)
	if err != nil {
		log.Fatal(err)
	}
	if *health != "" {
		http.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) {
			if _, err := os.Stat(socket); err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
			fmt.Fprintln(w, "ok")
		})
		go func() { log.Fatal(http.ListenAndServe(*health, nil)) }()
	}
	s := grpc.NewServer()
	registration.RegisterRegistrationServer(s, server{driver: driver, endpoint: *endpoint})
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, os.Interrupt)
	go func() { <-stop; os.Remove(socket); os.Exit(0) }()
	log.Printf("%s is announced at %s", driver, socket)
	log.Fatal(s.Serve(listener))
}

// The driver's name, asked until it answers.
func name(address string, timeout time.Duration) string {
	connection, err := grpc.NewClient("unix://"+address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	for {
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		info, err := csi.NewIdentityClient(connection).GetPluginInfo(ctx, &csi.GetPluginInfoRequest{}, grpc.WaitForReady(true))
		cancel()
		if err == nil {
			return info.GetName()
		}
		log.Printf("the driver at %s does not answer yet: %v", address, err)
		time.Sleep(time.Second)
	}
}
