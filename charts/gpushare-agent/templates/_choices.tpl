{{- /* The kustomize folders that the values choose, in kustomize's order, one a line. */ -}}
{{- define "gpushare-agent.folders" -}}
{{- $values := .Values -}}
{{- $first := first (splitList "+" $values.isolation) -}}
{{- $components := list -}}
{{- if not $values.simulated.enabled -}}
  {{- if has $first (list "vcuda" "mps") }}{{ $components = append $components $first }}{{ end -}}
  {{- if eq $first "none" }}{{ $components = append $components "isolation-none" }}{{ end -}}
{{- end -}}
{{- if $values.driverLimits.setByAgent }}{{ $components = append $components "driver-limits" }}{{ end -}}
{{- if $values.endUnlimited }}{{ $components = append $components "end-unlimited" }}{{ end -}}
{{- if $values.vcuda.driverContainer }}{{ $components = append $components "driver-container" }}{{ end -}}
{{- if $values.vcuda.pruneDriverVolume }}{{ $components = append $components "prune-driver-volume" }}{{ end -}}
{{- if contains "cdi-" (include "gpushare-agent.strategies" .) }}{{ $components = append $components "cdi" }}{{ end -}}
{{- if $values.driverFromHost.enabled }}{{ $components = append $components "driver-from-host" }}{{ end -}}
{{- if $values.nvidia.enabled }}{{ $components = append $components "nvidia" }}{{ end -}}
{{- if or $values.nvidia.migMonitor (has $values.migStrategy (list "single" "mixed")) -}}
  {{- if not $values.simulated.enabled }}{{ $components = append $components "nvidia-mig-monitor" }}{{ end -}}
{{- end -}}
{{- if $values.dra.enabled }}{{ $components = append $components "dra" }}{{ end -}}
{{- if $values.dra.wholeGpus.enabled }}{{ $components = append $components "dra-whole-gpus" }}{{ end -}}
{{- if $values.dra.nvidiaNames }}{{ $components = append $components "dra-nvidia-names" }}{{ end -}}
{{- if $values.dra.migProfiles }}{{ $components = append $components "dra-mig-profiles" }}{{ end -}}
{{- if $values.dra.migOnDemand }}{{ $components = append $components "mig-on-demand" }}{{ end -}}
{{- if $values.gpuMem.enabled }}{{ $components = append $components "gpushare" }}{{ end -}}
{{- if $values.staticPods.enabled }}{{ $components = append $components "static-pods" }}{{ end -}}
{{- if $values.staticPods.selfSignedKubelet }}{{ $components = append $components "static-pods-self-signed" }}{{ end -}}
{{- if $values.networkPolicy.enabled }}{{ $components = append $components "network-policy" }}{{ end -}}
{{- if $values.prometheusOperator.enabled }}{{ $components = append $components "prometheus-operator" }}{{ end -}}
{{- if $values.displaySocket.enabled }}{{ $components = append $components "display-socket" }}{{ end -}}
{{- if $values.runtimeSocket.enabled }}{{ $components = append $components "runtime-socket" }}{{ end -}}
{{- if or $values.config.map $values.config.name }}{{ $components = append $components "node-configuration" }}{{ end -}}
{{- if not $values.cleanupRejectedPods }}{{ $components = append $components "without-cleanup" }}{{ end -}}
{{- if not $values.nodeFacts }}{{ $components = append $components "without-node-facts" }}{{ end -}}
{{- if eq "false" (toString $values.hostPID) }}{{ $components = append $components "without-host-pid" }}{{ end -}}
{{- if ne $values.hostDirectory "/etc/gpu-manager" }}{{ $components = append $components "read-only-etc" }}{{ end -}}
{{- if ne $values.kubeletDirectory "/var/lib/kubelet" }}{{ $components = append $components "kubelet-directory" }}{{ end -}}
{{- if $values.openshift.enabled }}{{ $components = append $components "openshift" }}{{ end -}}
manifests/{{ ternary "overlays/simulated" "base" $values.simulated.enabled }}
{{- range $components }}
manifests/components/{{ . }}
{{- end }}
{{- end -}}

{{- define "gpushare-agent.strategies" -}}
{{- kindIs "slice" .Values.deviceListStrategy | ternary .Values.deviceListStrategy (list .Values.deviceListStrategy) | join "," -}}
{{- end -}}

{{- /* Combinations that no node could run, refused before anything is installed. */ -}}
{{- define "gpushare-agent.refusals" -}}
{{- $values := .Values -}}
{{- if and $values.simulated.enabled (not (has $values.isolation (list "gpushare" "vcuda"))) -}}
  {{- fail "simulated GPUs have no driver: leave `isolation` out, or choose gpushare or vcuda" -}}
{{- end -}}
{{- if and (or $values.vcuda.driverContainer $values.vcuda.pruneDriverVolume) (or $values.simulated.enabled (ne $values.isolation "vcuda")) -}}
  {{- fail "vcuda.driverContainer and vcuda.pruneDriverVolume are for `isolation: vcuda`" -}}
{{- end -}}
{{- if and $values.driverLimits.setByAgent (not (has "driver" (splitList "+" $values.isolation))) -}}
  {{- fail "driverLimits.setByAgent needs `isolation: gpushare+driver`, `mps+driver` or `driver`" -}}
{{- end -}}
{{- if $values.driverFromHost.enabled -}}
  {{- if or $values.simulated.enabled (not (or (eq $values.isolation "vcuda") (contains "cdi-" (include "gpushare-agent.strategies" .)))) -}}
    {{- fail "driverFromHost.enabled: containers then get GPUs by `deviceListStrategy: cdi-cri` or cdi-annotations, or by `isolation: vcuda`" -}}
  {{- end -}}
  {{- if and $values.mpsDaemon.enabled (or (hasPrefix "mps" $values.isolation) (eq $values.nvidia.sharing "mps")) -}}
    {{- fail "the MPS daemon's pod needs NVIDIA's container runtime: not with `driverFromHost.enabled: true`" -}}
  {{- end -}}
{{- end -}}
{{- if not (or $values.vcudaResources.enabled $values.nvidia.enabled $values.gpuMem.enabled $values.dra.enabled) -}}
  {{- fail "vcudaResources.enabled is false, and nothing else is offered: enable nvidia, gpuMem or dra" -}}
{{- end -}}
{{- if and (eq $values.isolation "vcuda") (kindIs "bool" $values.hostPID) (not $values.hostPID) -}}
  {{- fail "isolation vcuda counts by the host's PIDs: not with `hostPID: false`" -}}
{{- end -}}
{{- if not $values.dra.enabled -}}
  {{- if or $values.dra.wholeGpus.enabled $values.dra.nvidiaNames $values.dra.migOnDemand $values.dra.migProfiles -}}
    {{- fail "the values below dra need `dra.enabled: true`" -}}
  {{- end -}}
{{- else if not (or $values.dra.gpus $values.dra.migOnDemand) -}}
  {{- fail "dra.gpus is empty, and dra.migOnDemand too: no GPU is offered by claims" -}}
{{- end -}}
{{- if and $values.dra.migOnDemand (not (or $values.driverFromHost.enabled $values.nvidia.migMonitor $values.simulated.enabled)) -}}
  {{- fail "dra.migOnDemand: the driver must let the agent make instances, by a device node with `driverFromHost.enabled: true`, or by SYS_ADMIN with `nvidia.migMonitor: true`" -}}
{{- end -}}
{{- if and $values.dra.nvidiaNames $values.dra.wholeGpus.enabled (eq $values.dra.wholeGpus.resourceName "nvidia.com/gpu") -}}
  {{- fail "dra.nvidiaNames serves nvidia.com/gpu by its own class: leave `dra.wholeGpus.enabled` out, or give it another resourceName" -}}
{{- end -}}
{{- if and (or $values.migStrategy $values.deviceIDStrategy $values.nvidia.sharing) (not $values.nvidia.enabled) -}}
  {{- fail "migStrategy, deviceIDStrategy and nvidia.sharing need `nvidia.enabled: true`" -}}
{{- end -}}
{{- with $values.config -}}
  {{- if and .map .name }}{{ fail "config.map and config.name: give one of them" }}{{ end -}}
  {{- if and .default (not .name) (not (hasKey .map .default)) }}{{ fail (printf "config.default: %s is not in config.map" .default) }}{{ end -}}
{{- end -}}
{{- if and $values.staticPods.selfSignedKubelet (not $values.staticPods.enabled) -}}
  {{- fail "staticPods.selfSignedKubelet needs `staticPods.enabled: true`" -}}
{{- end -}}
{{- if and (or $values.extender.scheduler.enabled $values.extender.claimsWebhook.enabled $values.extender.networkPolicy.enabled) (not $values.extender.enabled) -}}
  {{- fail "extender.scheduler, extender.claimsWebhook and extender.networkPolicy need `extender.enabled: true`" -}}
{{- end -}}
{{- if and $values.extender.enabled (not $values.nodeFacts) -}}
  {{- fail "the extender knows GPUs by the nodes' annotations: not with `nodeFacts: false`" -}}
{{- end -}}
{{- if and $values.extender.claimsWebhook.enabled (not $values.extender.tls.enabled) -}}
  {{- fail "an API server asks a webhook by TLS alone: extender.claimsWebhook needs `extender.tls.enabled: true`" -}}
{{- end -}}
{{- with $values.extender -}}
  {{- if and .claimsWebhook.enabled (not (or .claimsWebhook.caBundle .claimsWebhook.annotations)) -}}
    {{- fail "extender.claimsWebhook: API servers need the extender's CA, or no pod can be created in its namespaces: give `caBundle` or `annotations`" -}}
  {{- end -}}
  {{- if and .claimsWebhook.enabled .networkPolicy.enabled (not .networkPolicy.extraFrom) -}}
    {{- fail "extender.claimsWebhook: API servers must reach it, add their addresses to `extender.networkPolicy.extraFrom`: [{ipBlock: {cidr: …}}]" -}}
  {{- end -}}
{{- end -}}
{{- $owned := dict "isolation" "isolation" "driver" "simulated.enabled" "device_list_strategy" "deviceListStrategy" -}}
{{- $owned = merge $owned (dict "dra.gpus" "dra.gpus" "mig.on_demand" "dra.migOnDemand" "dra.nvidia_names" "dra.nvidiaNames" "gpushare.enabled" "gpuMem.enabled") -}}
{{- $owned = merge $owned (dict "driver_limits.set_by_agent" "driverLimits.setByAgent" "libgpushare.unlimited" "endUnlimited" "facts.is_written" "nodeFacts") -}}
{{- if eq "mps" (toString ($values.settings.nvidia).sharing) }}{{ $_ := set $owned "nvidia.sharing" "nvidia.sharing" }}{{ end -}}
{{- $refused := dict "web.port" "Service, probes and policies have 5678, leave it out" -}}
{{- $_ := set $refused "root" "the manifests mount the node's places where they are, leave it out" -}}
{{- $_ := set $refused "kubelet.root_dir" "in the agent's pod it is /var/lib/kubelet, use the value `kubeletDirectory`" -}}
{{- include "gpushare-agent.refuse-in-map" (dict "map" $values.config.map "refused" $refused) -}}
{{- range $setting, $value := $owned }}{{ $_ := set $refused $setting (printf "use the value `%s`, which brings the mounts and rights that it needs" $value) }}{{ end -}}
{{- include "gpushare-agent.refuse" (dict "value" "settings" "settings" $values.settings "refused" $refused) -}}
{{- $refused = dict -}}
{{- range $name := list "resources" "gpushare" "placement.share_policy" -}}
  {{- $_ := set $refused $name (printf "the extender counts as the agents do, set `settings.%s`" $name) -}}
{{- end -}}
{{- $_ := set $refused "extender.port" "Service, probes and schedulers have 3456, leave it out" -}}
{{- $_ := set $refused "extender.leader_elect" "an update runs two replicas even of one, leave it out" -}}
{{- $_ := set $refused "extender.lease_namespace" "its Role names the Lease gpushare-agent-extender of the release's namespace, leave it out" -}}
{{- include "gpushare-agent.refuse" (dict "value" "extender.settings" "settings" $values.extender.settings "refused" $refused) -}}
{{- end -}}

{{- /* Settings that would do nothing, or break what the manifests have. Arguments: value, the settings' name; settings; refused,
from a setting's name to the reason. */ -}}
{{- define "gpushare-agent.refuse" -}}
{{- $arguments := . -}}
{{- range $setting, $reason := .refused -}}
  {{- $path := splitList "." $setting -}}
  {{- $section := $arguments.settings -}}
  {{- if gt (len $path) 1 }}{{ $section = get $section (first $path) | default dict }}{{ end -}}
  {{- if and (kindIs "map" $section) (hasKey $section (last $path)) }}{{ fail (printf "%s.%s: %s" $arguments.value $setting $reason) }}{{ end -}}
{{- end -}}
{{- end -}}

{{- /* The same in the configurations of single nodes. Arguments: map, of settings or of their YAML; refused. */ -}}
{{- define "gpushare-agent.refuse-in-map" -}}
{{- range $name, $one := .map -}}
  {{- $settings := kindIs "string" $one | ternary (fromYaml (toString $one)) $one -}}
  {{- include "gpushare-agent.refuse" (dict "value" (printf "config.map.%s" $name) "settings" $settings "refused" $.refused) -}}
{{- end -}}
{{- end -}}

{{- /* Those that a variable of the manifests overrides. Arguments: value, settings, container; map, as above. */ -}}
{{- define "gpushare-agent.refuse-overridden" -}}
{{- $refused := dict -}}
{{- range $one := .container.env -}}
  {{- if hasPrefix "GPUSHARE_" $one.name -}}
    {{- $setting := trimPrefix "GPUSHARE_" $one.name | lower | replace "__" "." -}}
    {{- $_ := set $refused $setting (printf "has no effect, for another value sets the variable %s, which goes before the file" $one.name) -}}
  {{- end -}}
{{- end -}}
{{- include "gpushare-agent.refuse" (dict "value" .value "settings" .settings "refused" $refused) -}}
{{- include "gpushare-agent.refuse-in-map" (dict "map" .map "refused" $refused) -}}
{{- end -}}

{{- /* Arguments: image, a map of the values; tag, its default. */ -}}
{{- define "gpushare-agent.image" -}}
{{- with .image.digest }}{{ printf "%s@%s" $.image.repository . }}{{ else }}{{ printf "%s:%s" .image.repository (.image.tag | default .tag) }}{{ end -}}
{{- end -}}

{{- /* The agent's image in a pod, of every container that has it. Arguments: root, pod. */ -}}
{{- define "gpushare-agent.set-image" -}}
{{- $root := .root -}}
{{- range $container := concat (.pod.initContainers | default list) .pod.containers -}}
  {{- if eq $container.image "gpushare-agent" -}}
    {{- $_ := set $container "image" (include "gpushare-agent.image" (dict "image" $root.Values.image "tag" $root.Chart.AppVersion)) -}}
    {{- $_ := set $container "imagePullPolicy" $root.Values.image.pullPolicy -}}
  {{- end -}}
{{- end -}}
{{- with $root.Values.imagePullSecrets }}{{ $_ := set $.pod "imagePullSecrets" . }}{{ end -}}
{{- end -}}

{{- /* Where a pod of each GPU node runs. Arguments: root, pod. */ -}}
{{- define "gpushare-agent.set-nodes" -}}
{{- $values := .root.Values -}}
{{- $pod := .pod -}}
{{- /* The component gpushare takes nodes with GPUShare's label, too, unless the nodes are chosen. */ -}}
{{- if or (not $pod.affinity) (ne (toJson $values.nodeSelector) (toJson (dict "nvidia-device-enable" "enable"))) -}}
  {{- $_ := set $pod "nodeSelector" $values.nodeSelector -}}
  {{- $_ := unset $pod "affinity" -}}
{{- end -}}
{{- $_ := set $pod "tolerations" $values.tolerations -}}
{{- with $values.affinity }}{{ $_ := set $pod "affinity" . }}{{ end -}}
{{- include "gpushare-agent.set-priority" . -}}
{{- if and $values.runtimeClassName (not (or $values.simulated.enabled $values.driverFromHost.enabled)) -}}
  {{- $_ := set $pod "runtimeClassName" $values.runtimeClassName -}}
{{- else }}{{ $_ := unset $pod "runtimeClassName" }}{{ end -}}
{{- end -}}

{{- /* Arguments: root, pod. */ -}}
{{- define "gpushare-agent.set-priority" -}}
{{- if .root.Values.priorityClassName -}}
  {{- $_ := set .pod "priorityClassName" .root.Values.priorityClassName -}}
{{- else }}{{ $_ := unset .pod "priorityClassName" }}{{ end -}}
{{- end -}}

{{- /* What the value `pods` changes in a pod, after all other values. Arguments: root, pod, of, a key of `pods`. */ -}}
{{- define "gpushare-agent.patch-pod" -}}
{{- $arguments := . -}}
{{- $patch := get .root.Values.pods .of | default dict | deepCopy -}}
{{- range $list := list "initContainers" "containers" -}}
  {{- $names := list -}}
  {{- range (get $arguments.pod $list | default list) }}{{ $names = append $names .name }}{{ end -}}
  {{- range (get $patch $list | default list) -}}
    {{- if not (has .name $names) }}{{ fail (printf "pods.%s.%s: this pod has no %s; with these values it has: %s" $arguments.of $list .name (join ", " $names)) }}{{ end -}}
  {{- end -}}
{{- end -}}
{{- include "gpushare-agent.merge" (dict "into" .pod "patch" $patch) -}}
{{- end -}}
