{{- /* All objects of the node agents, as JSON under Kind/name: the base and the chosen components, then what the values change. */ -}}
{{- define "gpushare-agent.agent" -}}
{{- include "gpushare-agent.refusals" . -}}
{{- $root := . -}}
{{- $values := .Values -}}
{{- $objects := dict -}}
{{- range $folder := splitList "\n" (include "gpushare-agent.folders" .) -}}
  {{- include "gpushare-agent.build" (dict "root" $root "folder" $folder "objects" $objects) -}}
{{- end -}}
{{- range $key := list (printf "Namespace/%s" .Release.Namespace) "ConfigMap/gpushare-agent-check" -}}
  {{- $_ := unset $objects $key -}} {{- /* Helm makes the one; the other is for the Job of manifests/check */ -}}
{{- end -}}

{{- $agent := get $objects "DaemonSet/gpushare-agent" -}}
{{- $pod := $agent.spec.template.spec -}}
{{- $container := first $pod.containers -}}
{{- include "gpushare-agent.set-image" (dict "root" . "pod" $pod) -}}
{{- if $values.hostPID }}{{ $_ := set $pod "hostPID" true }}{{ end -}}
{{- include "gpushare-agent.set-nodes" (dict "root" . "pod" $pod) -}}
{{- $_ := set $agent.spec "updateStrategy" (eq $values.updateStrategy.type "OnDelete" | ternary (dict "type" "OnDelete") $values.updateStrategy) -}}
{{- $asked := dict -}}
{{- range $name, $limit := ($container.resources.limits | default dict) }}{{ if contains "/" $name }}{{ $_ := set $asked $name $limit }}{{ end }}{{ end -}}
{{- $_ := set $container "resources" (deepCopy $values.resources) -}}
{{- if $asked }}{{ include "gpushare-agent.merge" (dict "into" $container "patch" (dict "resources" (dict "limits" $asked))) }}{{ end -}}
{{- with get $objects "DaemonSet/gpushare-driver-devices" -}}
  {{- include "gpushare-agent.set-image" (dict "root" $root "pod" .spec.template.spec) -}}
  {{- include "gpushare-agent.set-nodes" (dict "root" $root "pod" .spec.template.spec) -}}
  {{- include "gpushare-agent.patch-pod" (dict "root" $root "pod" .spec.template.spec "of" "driverDevices") -}}
{{- end -}}

{{- $variables := list -}}
{{- /* The base has gpushare, and three components their own. */ -}}
{{- if not (has $values.isolation (ternary (list "gpushare") (list "gpushare" "vcuda" "mps" "none") $values.simulated.enabled)) -}}
  {{- $variables = append $variables (dict "name" "GPUSHARE_ISOLATION" "value" $values.isolation) -}}
{{- end -}}
{{- with include "gpushare-agent.strategies" . -}}
  {{- $variables = append $variables (dict "name" "GPUSHARE_DEVICE_LIST_STRATEGY" "value" .) -}}
{{- end -}}
{{- if $values.simulated.enabled -}}
  {{- $variables = append $variables (dict "name" "GPUSHARE_SIMULATED__GPUS" "value" (toString $values.simulated.gpus)) -}}
  {{- $variables = append $variables (dict "name" "GPUSHARE_SIMULATED__GPU_MEMORY_MIB" "value" ($values.simulated.memoryMiB | int64 | toString)) -}}
{{- end -}}
{{- if not $values.vcudaResources.enabled -}}
  {{- $variables = append $variables (dict "name" "GPUSHARE_RESOURCES__ENABLED" "value" "false") -}}
{{- end -}}
{{- if $values.dra.enabled -}}
  {{- $variables = append $variables (dict "name" "GPUSHARE_DRA__GPUS" "value" (join "," $values.dra.gpus)) -}}
{{- end -}}
{{- with $values.dra.migOnDemand -}}
  {{- $variables = append $variables (dict "name" "GPUSHARE_MIG__ON_DEMAND" "value" (join "," .)) -}}
{{- end -}}
{{- with $values.nvidia.sharing -}}
  {{- $variables = append $variables (dict "name" "GPUSHARE_NVIDIA__SHARING" "value" .) -}}
{{- end -}}
{{- with $values.migStrategy -}}
  {{- $variables = append $variables (dict "name" "GPUSHARE_NVIDIA__MIG_STRATEGY" "value" .) -}}
{{- end -}}
{{- with $values.deviceIDStrategy -}}
  {{- $variables = append $variables (dict "name" "GPUSHARE_NVIDIA__DEVICE_IDS" "value" .) -}}
{{- end -}}
{{- if and (ne $values.cdiDirectory "/var/run/cdi") (eq $values.hostDirectory "/etc/gpu-manager") -}}
  {{- $variables = append $variables (dict "name" "GPUSHARE_CDI__SPEC_DIRECTORIES" "value" (printf "/etc/cdi,%s" $values.cdiDirectory)) -}}
{{- end -}}
{{- with $values.config.default -}}
  {{- $variables = append $variables (dict "name" "GPUSHARE_NODE_CONFIGURATION__DEFAULT" "value" .) -}}
{{- end -}}
{{- with $variables }}{{ include "gpushare-agent.merge" (dict "into" $container "patch" (dict "env" .)) }}{{ end -}}
{{- include "gpushare-agent.refuse-overridden" (dict "value" "settings" "settings" $values.settings "map" $values.config.map "container" $container) -}}
{{- with $values.env }}{{ include "gpushare-agent.merge" (dict "into" $container "patch" (dict "env" .)) }}{{ end -}}

{{- if $values.runtimeSocket.enabled -}}
  {{- $directory := $values.runtimeSocket.directory -}}
  {{- range $one := $container.volumeMounts -}}
    {{- if eq $one.name "runtime-socket" }}{{ $_ := set $one "mountPath" $directory }}{{ end -}}
  {{- end -}}
  {{- range $one := $pod.volumes -}}
    {{- if eq $one.name "runtime-socket" }}{{ $_ := set $one.hostPath "path" $directory }}{{ end -}}
  {{- end -}}
{{- end -}}
{{- with $values.config.map -}}
  {{- $data := dict -}}
  {{- range $name, $one := . }}{{ $_ := set $data $name (kindIs "string" $one | ternary $one (toYaml $one)) }}{{ end -}}
  {{- $metadata := dict "name" "gpushare-agent-nodes" "namespace" $root.Release.Namespace -}}
  {{- $_ := set $objects "ConfigMap/gpushare-agent-nodes" (dict "apiVersion" "v1" "kind" "ConfigMap" "metadata" $metadata "data" $data) -}}
{{- end -}}
{{- with $values.config.name -}}
  {{- range $one := $pod.volumes -}}
    {{- if eq $one.name "node-configurations" }}{{ $_ := set $one.configMap "name" $values.config.name }}{{ end -}}
  {{- end -}}
{{- end -}}
{{- with get $objects "DeviceClass/whole.gpushare-agent" -}}
  {{- $_ := set .spec "extendedResourceName" $values.dra.wholeGpus.resourceName -}}
{{- end -}}
{{- if not (has "all" $values.dra.migProfiles) -}}
  {{- $wanted := list -}}
  {{- range $profile := $values.dra.migProfiles -}}
    {{- $key := printf "DeviceClass/mig-%s.gpushare-agent" (replace "+" "." $profile) -}}
    {{- if not (hasKey $objects $key) }}{{ fail (printf "dra.migProfiles: %s is none of the profiles in manifests/components/dra-mig-profiles/classes.yaml" $profile) }}{{ end -}}
    {{- $wanted = append $wanted $key -}}
  {{- end -}}
  {{- range $key := keys $objects -}}
    {{- if and (hasPrefix "DeviceClass/mig-" $key) (not (has $key $wanted)) }}{{ $_ := unset $objects $key }}{{ end -}}
  {{- end -}}
{{- end -}}
{{- with get $objects "NetworkPolicy/gpushare-agent" -}}
  {{- $rule := first .spec.ingress -}}
  {{- $_ := set (first $rule.from).namespaceSelector.matchLabels "kubernetes.io/metadata.name" $values.networkPolicy.prometheusNamespace -}}
  {{- $_ := set $rule "from" (concat $rule.from $values.networkPolicy.extraFrom) -}}
{{- end -}}
{{- range $kind := list "PodMonitor" "PrometheusRule" -}}
  {{- with get $objects (printf "%s/gpushare-agent" $kind) -}}
    {{- include "gpushare-agent.merge" (dict "into" .metadata "patch" (dict "labels" $values.prometheusOperator.labels)) -}}
  {{- end -}}
{{- end -}}

{{- $data := (get $objects "ConfigMap/gpushare-agent").data -}}
{{- $settings := get $data "settings.yaml" | fromYaml -}}
{{- include "gpushare-agent.merge" (dict "into" $settings "patch" (dict "log" (dict "level" $values.logLevel))) -}}
{{- include "gpushare-agent.merge" (dict "into" $settings "patch" $values.settings) -}}
{{- $_ := set $data "settings.yaml" (toYaml $settings) -}}
{{- include "gpushare-agent.patch-pod" (dict "root" . "pod" $pod "of" "agent") -}}
{{- $metadata := $agent.spec.template.metadata -}}
{{- $annotations := merge (dict "checksum/settings" (toYaml $data | sha256sum)) $values.podAnnotations ($metadata.annotations | default dict) -}}
{{- $_ := set $metadata "annotations" $annotations -}}
{{- $_ := set $metadata "labels" (merge (deepCopy $metadata.labels) $values.podLabels) -}}
{{- toJson $objects -}}
{{- end -}}
