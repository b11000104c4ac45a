// A stand-in for the CSI livenessprobe: GET /healthz is a Probe of the driver. See ../node-driver-registrar for why.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"net/http"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

func main() {
	address := flag.String("csi-address", "/run/csi/socket", "the driver's socket")
	timeout := flag.Duration("probe-timeout", time.Second, "for one Probe")
	port := flag.String("health-port", "9808", "where to answer, unless --http-endpoint is given")
	endpoint := flag.String("http-endpoint", "", "where to answer")
	flag.String("metrics-address", "", "accepted for the stock flag's sake")
	flag.Int("v", 0, "accepted for the stock flag's sake")
	flag.Parse()
	if *endpoint == "" {
		*endpoint = ":" + *port
	}
	connection, err := grpc.NewClient("unix://"+*address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	http.HandleFunc("/healthz", func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), *timeout)
		defer cancel()
		answer, err := csi.NewIdentityClient(connection).Probe(ctx, &csi.ProbeRequest{})
		switch {
		case err != nil:
			log.Printf("probe: %v", err)
			http.Error(w, err.Error(), http.StatusInternalServerError)
		case answer.GetReady() != nil && !answer.GetReady().GetValue():
			http.Error(w, "the driver is not ready", http.StatusInternalServerError)
		default:
			fmt.Fprintln(w, "ok")
		}
	})
	log.Printf("probing %s, answering at %s", *address, *endpoint)
	log.Fatal(http.ListenAndServe(*endpoint, nil))
}
