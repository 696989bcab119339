#!/usr/bin/env bash
# on_rig.sh RIG [ARGUMENT…]: `nox -s e2e -- ARGUMENT…` on a one-node cluster that the program RIG makes on this machine, and
# that is wiped before and after: not for a machine that is a node. RIG has the commands up, down, wipe, build, image, kubeconfig; root, Debian 12.
# Variables: IMAGE_TAR, the agent's image where it is built already; OWN_PIDS, if not empty: in a PID namespace of its own, for the test of the driver by the host's root
# on a machine whose PID 1 shows nobody its own; NVIDIA_DRA_DRIVER, a checkout of NVIDIA's DRA driver, whose suites run too; E2E, the command
# that runs the tests in the place of nox.
set -euo pipefail
if [[ -n ${OWN_PIDS:-} ]]; then
  trap : TERM # the namespace's PID 1 has it too, and cleans up
  code=0
  OWN_PIDS='' unshare --pid --fork --mount-proc --kill-child "$0" "$@" || code=$?
  exit "$code"
fi
rig=$(readlink -f "$1")
shift
here=$(cd "$(dirname "$0")/../.." && pwd)
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$here/gpushare_agent/__init__.py")
export RIG_DIR=${RIG_DIR:-${TMPDIR:-/tmp}/rig}
export PATH=$RIG_DIR/bin:$PATH

work=$(mktemp -d) child='' made=()
# What the agent leaves on its node by design (docs/how-to/uninstall.md): this machine is the node.
for folder in /etc/gpu-manager /var/lib/gpushare-agent /usr/local/nvidia /etc/kubernetes /dev/nvidia{ctl,-uvm,-caps,0,1}; do [[ -e $folder ]] || made+=("$folder"); done
cleanup() {
  trap - EXIT
  [[ -z $child ]] || kill "$child" 2>/dev/null || true
  "$rig" wipe >/dev/null 2>&1 || true
  rm -rf "$work" "${made[@]}"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
interruptible() { # in the background, for a trap waits for what is in the foreground
  "$@" &
  child=$!
  wait "$child"
  child=''
}

# What an earlier run left, if it was killed.
"$rig" wipe >/dev/null 2>&1 || true

# The API server's audit log shows which rights are used: names of requests alone, no bodies.
mkdir -p "$work/audit"
cat >"$work/audit/policy.yaml" <<'POLICY'
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
  - level: Metadata
    users:
      - system:serviceaccount:gpushare-system:gpushare-agent
      - system:serviceaccount:gpushare-system:gpushare-agent-extender
      - system:serviceaccount:gpushare-system:gpushare-scheduler
  - level: None
POLICY
# Without kube-proxy the API server reaches a webhook's Service by its endpoints alone.
export RIG_APISERVER_ARGS="--enable-aggregator-routing=true --audit-policy-file=$work/audit/policy.yaml --audit-log-path=$work/audit/log"

interruptible "$rig" up
if [[ -n ${IMAGE_TAR:-} ]]; then
  "$rig" image "$IMAGE_TAR"
else
  # A copy of the tree: the checkout stays as it is.
  mkdir "$work/tree"
  git -C "$here" ls-files -z --cached --others --exclude-standard | (cd "$here" && xargs -0 cp --parents -t "$work/tree" 2>/dev/null) || true
  interruptible timeout 900 "$rig" build "$work/tree" "gpushare-agent:$version"
fi

# The images that the examples of NVIDIA's DRA driver name: a program that lists what a container was given.
if [[ -n ${NVIDIA_DRA_DRIVER:-} ]]; then
  interruptible timeout 300 "$rig" build "$here/tests/e2e/nvidia_dra" ubuntu:24.04
  for name in docker.io/library/ubuntu:22.04 nvcr.io/nvidia/cuda:12.2.0-base-ubuntu22.04 nvcr.io/nvidia/k8s/cuda-sample:{nbody-cuda11.6.0-ubuntu18.04,vectoradd-cuda12.5.0}; do
    "$rig" ctr images tag docker.io/library/ubuntu:24.04 "$name"
  done
fi

mkdir "$work/scheduler"
cp "$RIG_DIR/bin/kube-scheduler" "$work/scheduler/"
printf 'FROM scratch\nCOPY kube-scheduler /usr/local/bin/\nENV PATH=/usr/local/bin\n' >"$work/scheduler/Containerfile"
interruptible timeout 300 "$rig" build "$work/scheduler" kube-scheduler:rig

export KUBECONFIG
node_is_ready() { kubectl get nodes -o 'jsonpath={.items[*].status.conditions[?(@.type=="Ready")].status}' | grep -q True; }
KUBECONFIG=$("$rig" kubeconfig admin)
for _ in $(seq 300); do node_is_ready && break; sleep 1; done
# `up` looks for programs with a pipe that may end too early on a busy machine (SIGPIPE).
stop="$rig down -9 kubelet"
start="for i in 1 2 3 4 5; do $rig up containerd kubelet && exit; done; exit 1"
# As after a power failure: every process of the node has ended, /run is empty; the kubelet's files and etcd are on disk.
reboot="$stop; for t in \$($rig ctr tasks ls -q); do $rig ctr tasks kill -s 9 \$t; done
$rig down -9 containerd; rm -rf /run/rig/containerd /run/containerd; $start"
cd "$here"
interruptible ${E2E:-.venv/bin/nox -s e2e --} --image "gpushare-agent:$version" --static-pods "$RIG_DIR/etc/static" --audit-log "$work/audit/log" \
  --driver-libraries /usr/local/nvidia/lib64 --scheduler-image kube-scheduler:rig \
  --restart-kubelet "$stop; $start" --stop-kubelet "$stop" --start-kubelet "$start" --reboot-node "$reboot" "$@"
