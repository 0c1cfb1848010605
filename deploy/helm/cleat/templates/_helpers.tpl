{{- define "cleat.image" -}}
image: {{ printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) }}
{{- with .Values.image.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end }}

{{/* The image, arguments of values and resources of a sidecar: (dict "values" VALUES "args" ARGUMENTS). */}}
{{- define "cleat.sidecar" -}}
image: {{ .values.image }}
args: {{- concat .args .values.extraArgs | toYaml | nindent 2 }}
securityContext:
  # Only root can connect to the socket.
  runAsUser: 0
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: { drop: [ALL] }
  seccompProfile: { type: RuntimeDefault }
resources: {{- toYaml .values.resources | nindent 2 }}
volumeMounts:
  - { name: socket, mountPath: /csi }
{{- end }}

{{/* The directory of the socket on the node. */}}
{{- define "cleat.socketDirectory" -}}
{{ .Values.kubeletDirectory }}/plugins/cleat.csi.storage
{{- end }}

{{/* Whether kube-controller-manager attaches: empty if not. */}}
{{- define "cleat.attachRequired" -}}
{{- if and .Values.grants (not .Values.controller.attachDetach) }}true{{ end }}
{{- end }}

{{/* The configuration of the daemon: what the chart decides, with node.config. */}}
{{- define "cleat.config" -}}
{{- $config := dict
    "workers" (dict "cgroup" "/sys/fs/cgroup/cleat-workers" "upgrade_at_start" true)
    "metrics" (dict "listen" (printf "%s:%d" (ternary "[::]" "127.0.0.1" .Values.monitoring.enabled) (int .Values.node.metricsPort)))
    "csi" (dict "enabled" true "controller" true "grants" .Values.grants
        "clusters" "/etc/ceph/clusters.json" "directories" .Values.directories)
}}
{{- if ne .Values.kubeletDirectory "/var/lib/kubelet" }}
{{- $_ := set $config.csi "kubelet_dir" .Values.kubeletDirectory }}
{{- end }}
{{- if .Values.monitoring.enabled }}
{{- $_ := set $config.metrics "allow_remote" true }}
{{- end }}
{{- with .Values.node.logLevel }}
{{- $_ := set $config "log" (dict "level" .) }}
{{- end }}
{{- $config = mustMergeOverwrite $config (deepCopy .Values.node.config) }}
{{- range $table, $keys := $config }}
{{- range $key, $value := $keys }}
{{- /* Helm reads each number as one with a fraction, and no setting has one. */}}
{{- if kindIs "float64" $value }}{{ $_ := set $keys $key (int64 $value) }}{{ end }}
{{- end }}
{{- end }}
{{- toToml $config }}
{{- end }}
