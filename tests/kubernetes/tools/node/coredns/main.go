// Command coredns is CoreDNS with only the plugins that cluster DNS needs: the whole one takes minutes to build.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"

	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/health"
	_ "github.com/coredns/coredns/plugin/kubernetes"
)

func main() {
	// The order in which a query passes the plugins.
	dnsserver.Directives = []string{"health", "errors", "cache", "kubernetes"}
	coremain.Run()
}
