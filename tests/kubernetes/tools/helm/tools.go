//go:build tools

// Package tools pins the programs that the embedded cluster builds from this module.
package tools

import (
	_ "helm.sh/helm/v3/cmd/helm"
)
