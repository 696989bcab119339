{{- /*
What the chart installs is read from the kustomize folders at manifests/, so that nothing is written twice: a value chooses
folders (_choices.tpl), and these templates do with them what kustomize does. They know what these folders use: resources,
components, patches by path (of one object, or of all that a target's kind and name say), configMapGenerator. Tests compare the
result with kustomize's.
*/ -}}

{{- /* A file's text, for the release's namespace, the resources' names in the settings and the nodes' directories. Arguments: root, file. */ -}}
{{- define "gpushare-agent.read" -}}
{{- $text := .root.Files.Get .file -}}
{{- if not $text -}}
  {{- fail (printf "%s is not in the chart: its folder manifests is a symbolic link to ../../manifests, which Flux, Rancher and copies of the chart's folder leave out. Install the package that `helm package charts/gpushare-agent` makes (docs/how-to/install.md)" .file) -}}
{{- end -}}
{{- $settings := .root.Values.settings -}}
{{- $text = replace "tencent.com/vcuda-core" (($settings.resources).vcore | default "tencent.com/vcuda-core") $text -}}
{{- $text = replace "tencent.com/vcuda-memory" (($settings.resources).vmemory | default "tencent.com/vcuda-memory") $text -}}
{{- $text = replace "aliyun.com/gpu-mem" (($settings.gpushare).resource | default "aliyun.com/gpu-mem") $text -}}
{{- $text = replace "/var/lib/gpu-manager" .root.Values.hostDirectory $text | replace "/var/run/cdi" .root.Values.cdiDirectory -}}
{{- $text = replace "/var/lib/k0s/kubelet" .root.Values.kubeletDirectory $text -}}
{{- replace "gpushare-system" .root.Release.Namespace $text -}}
{{- end -}}

{{- /* The objects of a kustomization or component into .objects, under Kind/name. Arguments: root, folder, objects. */ -}}
{{- define "gpushare-agent.build" -}}
{{- $root := .root -}}
{{- $folder := .folder -}}
{{- $objects := .objects -}}
{{- $own := include "gpushare-agent.read" (dict "root" $root "file" (printf "%s/kustomization.yaml" $folder)) | fromYaml -}}
{{- range $name := $own.resources -}}
  {{- if hasSuffix ".yaml" $name -}}
    {{- include "gpushare-agent.file" (dict "root" $root "file" (printf "%s/%s" $folder $name) "objects" $objects) -}}
  {{- else -}}
    {{- include "gpushare-agent.build" (dict "root" $root "folder" (clean (printf "%s/%s" $folder $name)) "objects" $objects) -}}
  {{- end -}}
{{- end -}}
{{- range $one := $own.configMapGenerator -}}
  {{- $data := dict -}}
  {{- range $file := $one.files -}}
    {{- $_ := set $data $file (include "gpushare-agent.read" (dict "root" $root "file" (printf "%s/%s" $folder $file))) -}}
  {{- end -}}
  {{- $metadata := dict "name" $one.name "namespace" $root.Release.Namespace -}}
  {{- $_ := set $objects (printf "ConfigMap/%s" $one.name) (dict "apiVersion" "v1" "kind" "ConfigMap" "metadata" $metadata "data" $data) -}}
{{- end -}}
{{- range $name := $own.components -}}
  {{- include "gpushare-agent.build" (dict "root" $root "folder" (clean (printf "%s/%s" $folder $name)) "objects" $objects) -}}
{{- end -}}
{{- range $patch := $own.patches -}}
  {{- $file := printf "%s/%s" $folder $patch.path -}}
  {{- if $patch.target -}}
    {{- range $object := $objects -}}
      {{- if and (eq $object.kind $patch.target.kind) (regexMatch (printf "^(%s)$" ($patch.target.name | default ".*")) $object.metadata.name) -}}
        {{- $one := include "gpushare-agent.read" (dict "root" $root "file" $file) | fromYaml -}}
        {{- include "gpushare-agent.merge" (dict "into" $object "patch" (pick $one "spec")) -}}
      {{- end -}}
    {{- end -}}
  {{- else -}}
    {{- include "gpushare-agent.file" (dict "root" $root "file" $file "objects" $objects) -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- /* A file's objects: an object that is there already is patched. Arguments: root, file, objects. */ -}}
{{- define "gpushare-agent.file" -}}
{{- $objects := .objects -}}
{{- $file := .file -}}
{{- range $text := splitList "\n---\n" (include "gpushare-agent.read" (dict "root" .root "file" $file)) -}}
  {{- $one := fromYaml $text -}}
  {{- if hasKey $one "Error" }}{{ fail (printf "%s: %s" $file $one.Error) }}{{ end -}}
  {{- $key := printf "%s/%s" $one.kind $one.metadata.name -}}
  {{- if eq (get $one "$patch") "delete" -}}
    {{- $_ := unset $objects $key -}}
  {{- else if hasKey $objects $key -}}
    {{- include "gpushare-agent.merge" (dict "into" (get $objects $key) "patch" $one) -}}
  {{- else -}}
    {{- $_ := set $objects $key $one -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- /*
A strategic merge of a map: null removes a key, maps are merged, lists of objects that have names by them (volumeMounts by
mountPath), where `$patch: delete` removes one; any other value replaces the old one. Arguments: into, patch.
*/ -}}
{{- define "gpushare-agent.merge" -}}
{{- $into := .into -}}
{{- range $key, $value := .patch -}}
  {{- $old := get $into $key -}}
  {{- if kindIs "invalid" $value -}}
    {{- $_ := unset $into $key -}}
  {{- else if and (kindIs "map" $value) (kindIs "map" $old) -}}
    {{- include "gpushare-agent.merge" (dict "into" $old "patch" $value) -}}
  {{- else if and (kindIs "slice" $value) (kindIs "slice" $old) (kindIs "map" (first $value)) (or (hasKey (first $value) "name") (eq $key "volumeMounts")) -}}
    {{- $by := ternary "mountPath" "name" (eq $key "volumeMounts") -}}
    {{- $patches := dict -}}
    {{- range $one := $value }}{{ $_ := set $patches (get $one $by) $one }}{{ end -}}
    {{- $items := list -}}
    {{- range $item := $old -}}
      {{- $patch := get $patches (get $item $by) -}}
      {{- $_ := unset $patches (get $item $by) -}}
      {{- if not $patch -}}
        {{- $items = append $items $item -}}
      {{- else if ne (get $patch "$patch") "delete" -}}
        {{- include "gpushare-agent.merge" (dict "into" $item "patch" $patch) -}}
        {{- $items = append $items $item -}}
      {{- end -}}
    {{- end -}}
    {{- range $one := $value -}}
      {{- if and (hasKey $patches (get $one $by)) (ne (get $one "$patch") "delete") -}}
        {{- $item := dict -}}
        {{- include "gpushare-agent.merge" (dict "into" $item "patch" $one) -}}
        {{- $items = append $items $item -}}
      {{- end -}}
    {{- end -}}
    {{- $_ := set $into $key $items -}}
  {{- else -}}
    {{- $_ := set $into $key $value -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- /* The objects as YAML, with Helm's labels. A pod template gets none: it would restart every pod at each version of the
chart. Arguments: root, objects. */ -}}
{{- define "gpushare-agent.show" -}}
{{- $root := .root -}}
{{- range $key, $object := .objects }}
---
{{- $chart := printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" | trunc 63 }}
{{- $labels := dict "helm.sh/chart" (regexReplaceAll "[-_.]+$" $chart "") }}
{{- $_ := set $labels "app.kubernetes.io/managed-by" $root.Release.Service }}
{{- $_ := set $labels "app.kubernetes.io/instance" $root.Release.Name }}
{{- include "gpushare-agent.merge" (dict "into" $object "patch" (dict "metadata" (dict "labels" $labels))) }}
{{ toYaml $object }}
{{- end }}
{{- end -}}
