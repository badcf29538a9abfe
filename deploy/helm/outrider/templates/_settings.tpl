{{/* Keys that follow from the chart's own objects: what a user sets would silently break them. */}}
{{- define "outrider.ownSettings" -}}
- server.host
- server.port
- server.metrics_port
- server.drain_seconds
- server.name
- kv_transfer.port
- router.prefill_targets
- router.decode_targets
- router.draft_targets
- router.store
- router.token_file
- decode_node.draft_targets
- gateway.router_targets
- security.tls
- router.tls
{{- end }}

{{- define "outrider.refuseOwnSettings" -}}
{{- $settings := .settings -}}
{{- $where := .where -}}
{{- range $key := include "outrider.ownSettings" . | fromYamlArray -}}
{{- $parts := splitList "." $key -}}
{{- $section := index $settings (first $parts) -}}
{{- if and (kindIs "map" $section) (hasKey (default dict $section) (last $parts)) -}}
{{- fail (printf "%s.%s is set by the chart: see drainSeconds, store, tokens, tls and service in its values" $where $key) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* The same, as variables: their prefixes. */}}
{{- define "outrider.refuseOwnVariables" -}}
{{- $role := .role -}}
{{- range $variable := .variables -}}
{{- range $key := include "outrider.ownSettings" $ | fromYamlArray -}}
{{- $name := printf "OUTRIDER_%s" ($key | upper | replace "." "__") -}}
{{- if or (eq $variable.name $name) (hasPrefix (printf "%s__" $name) $variable.name) (eq $variable.name "OUTRIDER_CONFIG") -}}
{{- fail (printf "%s in %s.extraEnv is set by the chart: see drainSeconds, store, tokens, tls and service in its values" $variable.name $role) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "outrider.target" -}}
{{ include "outrider.headlessName" . }}:50051
{{- end }}

{{/* The file that one role reads, as YAML: what the chart knows, then settings, then the role's extraSettings. */}}
{{- define "outrider.settings" -}}
{{- $root := .root -}}
{{- $role := .role -}}
{{- $values := index $root.Values $role -}}
{{- include "outrider.refuseOwnSettings" (dict "settings" $root.Values.settings "where" "settings") -}}
{{- include "outrider.refuseOwnSettings" (dict "settings" $values.extraSettings "where" (printf "%s.extraSettings" $role)) -}}
{{- include "outrider.refuseOwnVariables" (dict "variables" $values.extraEnv "role" $role) -}}
{{- $server := dict "host" "0.0.0.0" "port" (ternary 8000 50051 (eq $role "openai")) "metrics_port" 9464 "drain_seconds" (int $values.drainSeconds) -}}
{{- $settings := dict "server" $server -}}
{{- $drafts := list -}}
{{- if $root.Values.draft_node.enabled -}}
{{- $drafts = list (include "outrider.target" (dict "root" $root "role" "draft_node")) -}}
{{- end -}}
{{- if eq $role "router" -}}
{{- $router := dict "prefill_targets" (list (include "outrider.target" (dict "root" $root "role" "prefill_node"))) -}}
{{- $_ := set $router "decode_targets" (list (include "outrider.target" (dict "root" $root "role" "decode_node"))) -}}
{{- $_ := set $router "draft_targets" $drafts -}}
{{- with $root.Values.store.url -}}{{- $_ := set $router "store" . -}}{{- end -}}
{{- with $root.Values.tokens.secretName -}}{{- $_ := set $router "token_file" "/run/tokens/tokens" -}}{{- end -}}
{{- $_ := set $settings "router" $router -}}
{{- end -}}
{{- if eq $role "decode_node" -}}
{{- $_ := set $settings "decode_node" (dict "draft_targets" $drafts) -}}
{{- $_ := set $settings "kv_transfer" (dict "port" 50052) -}}
{{- end -}}
{{- if eq $role "openai" -}}
{{- $routers := list -}}
{{- $name := include "outrider.roleName" (dict "root" $root "role" "router") -}}
{{- range $number := until (int $root.Values.router.replicas) -}}
{{- $routers = append $routers (printf "%s-%d.%ss:50051" $name $number $name) -}}
{{- end -}}
{{- $_ := set $settings "gateway" (dict "router_targets" $routers) -}}
{{- end -}}
{{- if $root.Values.tls.enabled -}}
{{- $_ := set $settings "security" (dict "tls" (dict "certificate" "/run/tls/tls.crt" "private_key" "/run/tls/tls.key" "authority" "/run/tls/ca.crt")) -}}
{{- end -}}
{{- with $values.gpu -}}
{{- if gt (int .count) 0 -}}
{{- $_ := set $settings "model" (dict "device" "cuda") -}}
{{- if ne $role "draft_node" -}}{{- $_ := set $settings.model "tensor_parallel_size" (int .count) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml (mustMergeOverwrite $settings (deepCopy $root.Values.settings) (deepCopy $values.extraSettings)) -}}
{{- end }}

{{/* "true" where a role's pods need a model on their disk. */}}
{{- define "outrider.needsModel" -}}
{{- if has .role (list "prefill_node" "decode_node") -}}true
{{- else if eq .role "draft_node" -}}
{{- $draft := get (include "outrider.settings" . | fromYaml) "draft_node" | default dict -}}
{{- if has (get $draft "proposer") (list "draft_model" "head") -}}true{{- end -}}
{{- end -}}
{{- end }}
