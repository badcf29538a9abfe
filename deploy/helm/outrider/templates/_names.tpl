{{/* Services' names have no dots, which names of releases may have. The longest of our suffixes has 13 characters. */}}
{{- define "outrider.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $full .Values.fullnameOverride | replace "." "-" | trunc 40 | trimAll "-" -}}
{{- end }}

{{/* Of a role's objects; called with root and role. */}}
{{- define "outrider.roleName" -}}
{{ include "outrider.fullname" .root }}-{{ .role | replace "_" "-" }}
{{- end }}

{{/* The headless Service of a role. The routers' own name is that of the Service with one address. */}}
{{- define "outrider.headlessName" -}}
{{ include "outrider.roleName" . }}{{ if eq .role "router" }}s{{ end }}
{{- end }}

{{- define "outrider.selectorLabels" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
{{- with .role }}
app.kubernetes.io/component: {{ . | replace "_" "-" }}
{{- end }}
{{- end }}

{{- define "outrider.labels" -}}
{{ include "outrider.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "outrider.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "outrider.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end }}

{{- define "outrider.tlsSecretName" -}}
{{- default (printf "%s-tls" (include "outrider.fullname" .)) .Values.tls.secretName -}}
{{- end }}

{{/* The roles of this release, as a YAML list. */}}
{{- define "outrider.roles" -}}
- router
- prefill_node
- decode_node
{{- if .Values.draft_node.enabled }}
- draft_node
{{- end }}
{{- if .Values.openai.enabled }}
- openai
{{- end }}
{{- end }}

{{/* What does not go together, said before anything is installed. */}}
{{- define "outrider.check" -}}
{{- if regexMatch "^[0-9]" (include "outrider.fullname" .) -}}
{{- fail (printf "the release's name %s begins with a digit, which names of Services may not: set fullnameOverride" .Release.Name) -}}
{{- end -}}
{{- range $role := include "outrider.roles" . | fromYamlArray -}}
{{- $values := index $.Values $role -}}
{{- range $label, $_ := $values.podLabels -}}
{{- if or (hasPrefix "app.kubernetes.io/" $label) (hasPrefix "helm.sh/" $label) -}}
{{- fail (printf "%s.podLabels: %s is set by the chart" $role $label) -}}
{{- end -}}
{{- end -}}
{{- with $values.rollingUpdate -}}
{{- if and (has (toString .maxSurge) (list "0" "0%")) (has (toString .maxUnavailable) (list "0" "0%")) -}}
{{- fail (printf "%s.rollingUpdate: maxSurge and maxUnavailable are both 0: no update could begin" $role) -}}
{{- end -}}
{{- end -}}
{{- with $values.autoscaling -}}
{{- if gt (int .minReplicas) (int .maxReplicas) -}}
{{- fail (printf "%s.autoscaling: minReplicas %d is more than maxReplicas %d" $role (int .minReplicas) (int .maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.openai.enabled (lt (int .Values.router.replicas) 1) -}}
{{- fail "openai.enabled with router.replicas=0: the gateway needs a router" -}}
{{- end -}}
{{- if and .Values.openai.enabled (or .Values.tls.enabled .Values.tokens.secretName) -}}
{{- fail "openai.enabled: the gateway speaks plaintext and has no token: not together with tls.enabled or tokens.secretName" -}}
{{- end -}}
{{- if and .Values.tls.enabled (not .Values.tls.certManager.enabled) (not .Values.tls.secretName) -}}
{{- fail "tls.secretName is empty: name a Secret with tls.crt, tls.key and ca.crt, or set tls.certManager.enabled" -}}
{{- end -}}
{{- if and .Values.tls.certManager.enabled (not .Values.tls.enabled) -}}
{{- fail "tls.certManager.enabled without tls.enabled: nobody would use the certificate" -}}
{{- end -}}
{{- if and .Values.tls.certManager.enabled (not .Values.tls.certManager.issuerRef.name) -}}
{{- fail "tls.certManager.issuerRef.name is empty: name an Issuer or ClusterIssuer" -}}
{{- end -}}
{{- with .Values.tls.certManager -}}
{{- if le (trimSuffix "h" .duration | int) (trimSuffix "h" .renewBefore | int) -}}
{{- fail (printf "tls.certManager.renewBefore %s is not less than duration %s" .renewBefore .duration) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.tokens.secretName (not .Values.tls.enabled) -}}
{{- fail "tokens.secretName without tls.enabled: in plaintext everybody on the way could read the tokens" -}}
{{- end -}}
{{- end }}

{{- define "outrider.scalingBehavior" -}}
scaleUp:
  stabilizationWindowSeconds: 0
scaleDown: # each pod that goes moves its answers to the others
  stabilizationWindowSeconds: 300
  policies:
    - {type: Pods, value: 1, periodSeconds: 60}
{{- end }}
