{{- define "penstock.name" -}}
{{- if contains "penstock" .Release.Name -}}
{{- .Release.Name | trunc 57 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-penstock" (.Release.Name | trunc 48 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{- define "penstock.selector" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "penstock.image" -}}
{{- $tag := gt (int .Values.gpus) 0 | ternary .Chart.AppVersion (printf "%s-cpu" .Chart.AppVersion) -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default $tag }}
{{- end -}}
