{{/* Labels of an object: (list . "component"); an empty component is left out. The first two are in the manifests, too. */}}
{{- define "millpond.labels" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: millpond
{{- with index . 1 }}
app.kubernetes.io/component: {{ . }}
{{- end }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ $root.Chart.Name }}-{{ $root.Chart.Version }}
{{- end -}}

{{/* Labels of pods, which never change: selectors are immutable. */}}
{{- define "millpond.selector" -}}
app.kubernetes.io/name: millpond
app.kubernetes.io/component: {{ . }}
{{- end -}}

{{- define "millpond.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{/* An array of strings for agent.toml, written as the manifests write it. */}}
{{- define "millpond.array" -}}
[{{ range $i, $value := . }}{{ if $i }}, {{ end }}{{ $value | toJson }}{{ end }}]
{{- end -}}

{{/* Directories of the tiers on disks, as JSON. */}}
{{- define "millpond.tierPaths" -}}
{{- $paths := list -}}
{{- range .Values.cache.tiers }}{{ $paths = concat $paths .paths }}{{ end -}}
{{- $paths | toJson -}}
{{- end -}}

{{/* Host directories of tiers that do not lie in the directories that are mounted anyway, as JSON. */}}
{{- define "millpond.extraTierPaths" -}}
{{- $extra := list -}}
{{- range (include "millpond.tierPaths" . | fromJsonArray) }}
{{- if not (hasPrefix "/var/lib/millpond/" .) }}{{ $extra = append $extra . }}{{ end }}
{{- end -}}
{{- $extra | toJson -}}
{{- end -}}

{{/* Directories of file:// sources, those that are only read and those that are written to, as JSON. */}}
{{- define "millpond.roots" -}}
{{- concat .Values.allow.roots (.Values.allow.writableRoots | default (list)) | uniq | toJson -}}
{{- end -}}

{{- define "millpond.nothing" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "millpond.nodeSelector" -}}
kubernetes.io/os: linux
{{- with . }}
{{ toYaml . }}
{{- end }}
{{- end -}}
