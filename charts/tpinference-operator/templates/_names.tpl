{{- define "tpinference-operator.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "tpinference-operator.fullname" -}}
{{- $name := include "tpinference-operator.name" . }}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else if contains $name .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "tpinference-operator.selectorLabels" -}}
app.kubernetes.io/name: {{ include "tpinference-operator.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tpinference-operator.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "tpinference-operator.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "tpinference-operator.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "tpinference-operator.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- required "serviceAccount.name must be set when serviceAccount.create is false" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- /* The namespaces to watch, comma-separated; empty = all of them. */ -}}
{{- define "tpinference-operator.namespaces" -}}
{{- if eq .Values.rbac.scope "cluster" }}
{{- if .Values.watchNamespaces }}
{{- fail "watchNamespaces only has a meaning with rbac.scope=namespace; with rbac.scope=cluster all namespaces are watched" }}
{{- end }}
{{- else }}
{{- join "," (default (list .Release.Namespace) .Values.watchNamespaces) }}
{{- end }}
{{- end }}
