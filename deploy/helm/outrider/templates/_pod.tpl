{{/* `outrider probe` for one name of the health service: where TLS keeps Kubernetes' own gRPC probes out. */}}
{{- define "outrider.probe" -}}
{{- if .root.Values.tls.enabled }}
exec:
  command:
    - outrider
    - probe
    - --target=127.0.0.1:50051
    - --authority=/run/tls/ca.crt
    - --certificate=/run/tls/tls.crt
    - --private-key=/run/tls/tls.key
    - {{ printf "--server-name=%s" (include "outrider.peerName" .root) | quote }}
    {{- with .service }}
    - --service={{ . }}
    {{- end }}
{{- else }}
grpc:
  port: 50051
  service: {{ .service | quote }}
{{- end }}
{{- end }}

{{- define "outrider.peerName" -}}
{{- $security := get .Values.settings "security" | default dict -}}
{{- get $security "peer_name" | default "outrider-node" -}}
{{- end }}

{{- define "outrider.image" -}}
{{- $image := mergeOverwrite (deepCopy .root.Values.image) (index .root.Values .role).image -}}
{{- $tag := default .root.Chart.AppVersion $image.tag -}}
{{ $image.repository }}{{ ternary "@" ":" (hasPrefix "sha256:" $tag) }}{{ $tag }}
{{- end }}

{{- define "outrider.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "outrider.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001 # may read Secrets' files
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "outrider.pullSecrets" -}}
{{- with .Values.image.pullSecrets -}}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "outrider.graceSeconds" -}}
{{- $values := index .root.Values .role -}}
{{- add (int (default 0 $values.preStopSeconds)) (int $values.drainSeconds) 5 -}}
{{- end }}

{{- define "outrider.volumeMounts" -}}
- {name: settings, mountPath: /etc/outrider, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if include "outrider.needsModel" . }}
- {name: cache, mountPath: /var/lib/outrider}
{{- end }}
{{- end }}

{{/* The template of a role's pods; called with root and role. */}}
{{- define "outrider.podTemplate" -}}
{{- $root := .root -}}
{{- $role := .role -}}
{{- $values := index $root.Values $role -}}
{{- $settings := include "outrider.settings" . | fromYaml -}}
{{- $needsModel := include "outrider.needsModel" . -}}
{{- $gpus := int (dig "gpu" "count" 0 $values) -}}
{{- $given := list -}} {{- /* variables that are not ours to set */}}
{{- range $values.extraEnv }}{{ $given = append $given .name }}{{ end -}}
metadata:
  labels:
    {{- include "outrider.labels" . | nindent 4 }}
    {{- with $values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- $annotations := dict }}
  {{- if $root.Values.metrics.annotations }}
  {{- $annotations = dict "prometheus.io/scrape" "true" "prometheus.io/port" "9464" }}
  {{- end }}
  {{- $hash := include "outrider.settings" . | sha256sum }} {{- /* other settings, other pods */}}
  annotations:
    {{- toYaml (mergeOverwrite $annotations (deepCopy $values.podAnnotations) (dict "outrider/settings" $hash)) | nindent 4 }}
spec:
  serviceAccountName: {{ include "outrider.serviceAccountName" $root | quote }}
  automountServiceAccountToken: false
  enableServiceLinks: false # its variables, such as OUTRIDER_ROUTER_PORT, look like settings
  shareProcessNamespace: true # a first process ignores SIGTERM until Python has installed its handler
  terminationGracePeriodSeconds: {{ include "outrider.graceSeconds" . }}
  securityContext:
    {{- include "outrider.podSecurity" $root | nindent 4 }}
  {{- include "outrider.pullSecrets" $root | nindent 2 }}
  {{- with $values.priorityClassName }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- with $values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if or $values.tolerations (gt $gpus 0) }}
  tolerations:
    {{- if gt $gpus 0 }}
    - {key: {{ $values.gpu.resource | quote }}, operator: Exists, effect: NoSchedule}
    {{- end }}
    {{- with $values.tolerations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  {{- if ne $values.antiAffinity "none" }}
  affinity:
    podAntiAffinity:
      {{- if eq $values.antiAffinity "hard" }}
      requiredDuringSchedulingIgnoredDuringExecution:
        - topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- include "outrider.selectorLabels" . | nindent 14 }}
      {{- else }}
      preferredDuringSchedulingIgnoredDuringExecution:
        - weight: 100
          podAffinityTerm:
            topologyKey: kubernetes.io/hostname
            labelSelector:
              matchLabels:
                {{- include "outrider.selectorLabels" . | nindent 16 }}
      {{- end }}
  {{- end }}
  topologySpreadConstraints:
    {{- if $values.topologySpreadConstraints }}
    {{- toYaml $values.topologySpreadConstraints | nindent 4 }}
    {{- else }}
    - maxSkew: 1
      topologyKey: topology.kubernetes.io/zone
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "outrider.selectorLabels" . | nindent 10 }}
    {{- end }}
  {{- if and $needsModel $root.Values.fetch.enabled }}
  initContainers:
    - name: fetch
      image: {{ include "outrider.image" . | quote }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      command: [outrider, fetch]
      env:
        - {name: OUTRIDER_CONFIG, value: /etc/outrider/{{ $role }}.yaml}
        {{- with $root.Values.fetch.tokenSecret }}
        {{- if .name }}
        - name: HF_TOKEN
          valueFrom:
            secretKeyRef: {name: {{ .name | quote }}, key: {{ .key | quote }}}
        {{- end }}
        {{- end }}
        {{- with $root.Values.fetch.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      securityContext:
        {{- include "outrider.containerSecurity" $root | nindent 8 }}
      {{- with $values.resources }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      volumeMounts:
        {{- include "outrider.volumeMounts" . | nindent 8 }}
        {{- with $values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  {{- end }}
  containers:
    - name: {{ $role | replace "_" "-" }}
      image: {{ include "outrider.image" . | quote }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      {{- if eq $role "openai" }}
      command: [python, -P, -m, outrider.cluster.gateway]
      {{- else }}
      command: [python, -P, -m, {{ $role }}]
      {{- end }}
      env:
        - {name: OUTRIDER_CONFIG, value: /etc/outrider/{{ $role }}.yaml}
        - name: OUTRIDER_SERVER__NAME
          valueFrom:
            fieldRef: {fieldPath: metadata.name}
        {{- if not (has "HF_HUB_OFFLINE" $given) }}
        - {name: HF_HUB_OFFLINE, value: "1"} # the model is in the cache
        {{- end }}
        {{- if and (not (has "OUTRIDER_MODEL__NUM_THREADS" $given)) (has $role (list "prefill_node" "decode_node" "draft_node")) (dig "limits" "cpu" "" $values.resources) (not (dig "model" "num_threads" "" $settings)) (eq $gpus 0) }}
        - name: OUTRIDER_MODEL__NUM_THREADS # a thread that the limit stops would hold up the others
          valueFrom:
            resourceFieldRef: {resource: limits.cpu}
        {{- end }}
        {{- if and (eq $role "router") $root.Values.store.passwordSecret.name (not (has "OUTRIDER_STORE_PASSWORD" $given)) }}
        - name: OUTRIDER_STORE_PASSWORD
          valueFrom:
            secretKeyRef: {name: {{ $root.Values.store.passwordSecret.name | quote }}, key: {{ $root.Values.store.passwordSecret.key | quote }}}
        {{- end }}
        {{- with $values.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        {{- if eq $role "openai" }}
        - {name: http, containerPort: 8000}
        {{- else }}
        - {name: grpc, containerPort: 50051}
        {{- end }}
        {{- if eq $role "decode_node" }}
        - {name: kv, containerPort: 50052}
        {{- end }}
        - {name: metrics, containerPort: 9464}
      {{- if eq $role "openai" }}
      startupProbe: # it waits for routers
        httpGet: {path: /liveness, port: http}
        periodSeconds: 2
        timeoutSeconds: 5
        failureThreshold: 60
      readinessProbe:
        httpGet: {path: /readiness, port: http}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      livenessProbe:
        httpGet: {path: /liveness, port: http}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      {{- else }}
      {{- $tls := $root.Values.tls.enabled }} {{- /* A command costs a third of a second of a processor. */}}
      startupProbe:
        {{- /* A router waits for its nodes, however long they load: to restart it would not help. */}}
        {{- include "outrider.probe" (dict "root" $root "service" (ternary "liveness" "" (eq $role "router"))) | trim | nindent 8 }}
        periodSeconds: 5
        timeoutSeconds: {{ ternary 10 5 $tls }}
        failureThreshold: {{ div (int (default 120 $values.startupSeconds)) 5 }}
      readinessProbe:
        {{- include "outrider.probe" (dict "root" $root "service" "") | trim | nindent 8 }}
        periodSeconds: {{ ternary 15 5 $tls }}
        timeoutSeconds: {{ ternary 10 5 $tls }}
        failureThreshold: 2
      livenessProbe:
        {{- include "outrider.probe" (dict "root" $root "service" "liveness") | trim | nindent 8 }}
        periodSeconds: {{ ternary 30 10 $tls }}
        timeoutSeconds: {{ ternary 10 5 $tls }}
        failureThreshold: {{ ternary 2 6 $tls }}
      {{- end }}
      {{- if $values.preStopSeconds }}
      lifecycle:
        preStop: # until no Service sends anything here any more
          exec: {command: [sleep, {{ $values.preStopSeconds | int | quote }}]}
      {{- end }}
      securityContext:
        {{- include "outrider.containerSecurity" $root | nindent 8 }}
      {{- if or $values.resources (gt $gpus 0) }}
      {{- $limits := dict }}
      {{- if gt $gpus 0 }}{{- $limits = dict "limits" (dict $values.gpu.resource $gpus) }}{{- end }}
      resources:
        {{- toYaml (mergeOverwrite $limits (deepCopy $values.resources)) | nindent 8 }}
      {{- end }}
      volumeMounts:
        {{- include "outrider.volumeMounts" . | nindent 8 }}
        {{- if $root.Values.tls.enabled }}
        - {name: tls, mountPath: /run/tls, readOnly: true}
        {{- end }}
        {{- if and (eq $role "router") $root.Values.tokens.secretName }}
        - {name: tokens, mountPath: /run/tokens, readOnly: true}
        {{- end }}
        {{- if gt $gpus 1 }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
        {{- with $values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: settings
      configMap:
        name: {{ include "outrider.fullname" $root }}
        items:
          - {key: {{ $role }}.yaml, path: {{ $role }}.yaml}
    - name: tmp
      emptyDir: {sizeLimit: 256Mi}
    {{- if $needsModel }}
    - name: cache
      {{- if eq $root.Values.cache.type "persistentVolumeClaim" }}
      persistentVolumeClaim:
        claimName: {{ default (printf "%s-cache" (include "outrider.fullname" $root)) $root.Values.cache.existingClaim | quote }}
      {{- else if eq $root.Values.cache.type "hostPath" }}
      hostPath: {path: {{ $root.Values.cache.hostPath | quote }}, type: DirectoryOrCreate}
      {{- else }}
      emptyDir: {sizeLimit: {{ $root.Values.cache.size }}}
      {{- end }}
    {{- end }}
    {{- if $root.Values.tls.enabled }}
    - name: tls
      secret: {secretName: {{ include "outrider.tlsSecretName" $root | quote }}, defaultMode: 0440}
    {{- end }}
    {{- if and (eq $role "router") $root.Values.tokens.secretName }}
    - name: tokens
      secret:
        secretName: {{ $root.Values.tokens.secretName | quote }}
        defaultMode: 0440
        items:
          - {key: {{ $root.Values.tokens.key | quote }}, path: tokens}
    {{- end }}
    {{- if gt $gpus 1 }}
    - name: shm
      emptyDir: {medium: Memory}
    {{- end }}
    {{- with $values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
