#!/usr/bin/env bash
# For .github/workflows/other-projects.yml: a kind cluster that has this checkout's image, with the agent's label on one of two workers.
set -euo pipefail
PATH=$(go env GOPATH)/bin:$PATH
go install "sigs.k8s.io/kind@$KIND"
docker build -f Containerfile -t "$IMAGE:tried" .
kind create cluster --image "$NODE" --wait 3m --config - <<'CLUSTER'
kind: Cluster
apiVersion: kind.x-k8s.io/v1alpha4
nodes: [{role: control-plane}, {role: worker}, {role: worker}]
CLUSTER
kind load docker-image "$IMAGE:tried"
kubectl label node kind-worker nvidia-device-enable=enable
