{{- define "tandem.name" -}}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride }}
{{- else if contains .Chart.Name .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-{{ .Chart.Name }}{{ end }}
{{- end }}

{{- /* Quoted, as every value that a user chooses is: YAML reads a name such as 123 or on as something else. */}}
{{- define "tandem.account" -}}
{{ .Values.serviceAccount.name | default (ternary (include "tandem.name" .) "default" .Values.serviceAccount.create) | quote }}
{{- end }}

{{- /* The address on which processes listen. */}}
{{- define "tandem.any" -}}
{{ ternary "::" "0.0.0.0" (eq .Values.ip_family "IPv6") }}
{{- end }}

{{- /* (root, component): what a Deployment selects; never to be changed */}}
{{- define "tandem.selector" -}}
app.kubernetes.io/name: tandem
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- with .root.Model }}
tandem.model: {{ . | quote }}
{{- end }}
{{- end }}

{{- /* (root, component): the name of its Deployment */}}
{{- define "tandem.component" -}}
{{ include "tandem.name" .root }}-{{ with .root.Model }}{{ . }}-{{ end }}{{ .component }}
{{- end }}

{{- /* (list, maps): the first one, with what the second one has in place of its own. As JSON. Sprig's merge takes 0, false
and "" for absent. */}}
{{- define "tandem.over" -}}
{{- $result := deepCopy (index . 0) }}
{{- range $key, $value := index . 1 }}
{{- $old := get $result $key }}
{{- $both := and (kindIs "map" $value) (kindIs "map" $old) }}
{{- if $both }}{{ $value = include "tandem.over" (list $old $value) | fromJson }}{{ end }}
{{- $_ := set $result $key $value }}
{{- end }}
{{- toJson $result }}
{{- end }}

{{- /* (root, model: one of `models`): the values of a release that has only this model. As JSON. */}}
{{- define "tandem.model.values" -}}
{{- $own := dict "settings" .model.settings "pools" (.model.pools | default dict) "models" list }}
{{- include "tandem.over" (list .root.Values $own) }}
{{- end }}

{{- /* (root, model): the end of the name of its pools in the registry. As with tandem.cluster, another checkpoint has
another one. */}}
{{- define "tandem.model.cluster" -}}
{{- $settings := (include "tandem.model.values" . | fromJson).settings }}
{{- $same := list .model.name }}
{{- range list "model" "dtype" "weights" "kv_dtype" }}{{ $same = append $same (get $settings .) }}{{ end }}
{{- .model.name }}-{{ toJson $same | sha256sum | trunc 8 }}
{{- end }}

{{- /* For routers, the setting `models`: what each model has of its own. As JSON. */}}
{{- define "tandem.models" -}}
{{- $found := dict }}
{{- range .Values.models }}
{{- if hasKey $found .name }}{{ fail (printf "models: two are named %s" .name) }}{{ end }}
{{- $about := dict "root" $ "model" . }}
{{- $own := include "tandem.over" (list .settings (dict "cluster" (include "tandem.model.cluster" $about))) | fromJson }}
{{- $values := include "tandem.model.values" $about | fromJson }}
{{- if include "tandem.no_prefill" $values }}{{ $_ := set $own "prefill" 0 }}{{ end }}
{{- $own = merge $own (include "tandem.autoscale" $values | fromJson) }}
{{- $_ := set $found .name $own }}
{{- end }}
{{- toJson $found }}
{{- end }}

{{- /* (values): the settings of Tandem's own autoscaler, where it sizes the pools. As JSON. */}}
{{- define "tandem.autoscale" -}}
{{- $own := dict }}
{{- if has "tandem" (list .pools.prefill.autoscaling.kind .pools.decode.autoscaling.kind) }}
{{- $_ := set $own "autoscale" "on" }}
{{- $named := .settings.model }}
{{- range $pool, $of := .pools }}
{{- if has $of.autoscaling.kind (list "hpa" "keda") }}
{{- fail (printf "model %s: pools.%s.autoscaling.kind is %s and the other pool's is tandem, which sizes both; choose tandem or none" $named $pool $of.autoscaling.kind) }}
{{- end }}
{{- $scaled := eq $of.autoscaling.kind "tandem" }}
{{- $_ := set $own $pool (ternary $of.autoscaling.min $of.replicas $scaled) }}
{{- $_ := set $own (printf "%s_max" $pool) (ternary $of.autoscaling.max $of.replicas $scaled) }}
{{- end }}
{{- if and (eq (int $own.prefill) (int $own.prefill_max)) (eq (int $own.decode) (int $own.decode_max)) }}
{{- fail (printf "model %s: autoscaling.kind tandem needs a pool whose autoscaling.min is below its autoscaling.max" .settings.model) }}
{{- end }}
{{- end }}
{{- toJson $own }}
{{- end }}

{{- /* (values): whether there is no pool of prefill workers; empty: there is one */}}
{{- define "tandem.no_prefill" -}}
{{- if and (eq .pools.prefill.autoscaling.kind "none") (eq (int .pools.prefill.replicas) 0) }}yes{{ end }}
{{- end }}

{{- define "tandem.labels" -}}
{{ include "tandem.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- /* (root, image: router or worker) */}}
{{- define "tandem.image" -}}
{{- $image := .root.Values.image -}}
"{{ with $image.registry }}{{ . }}/{{ end }}{{ get $image .image }}:{{ $image.tag | default .root.Chart.AppVersion }}{{ with get $image.digests .image }}@{{ . }}{{ end }}"
{{- end }}

{{- define "tandem.secret" -}}
{{ .Values.secret | default (include "tandem.name" .) | quote }}
{{- end }}

{{- define "tandem.hardened" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- /* The name under which processes find each other. It has what an answer depends on in it, so that in the middle of an
upgrade to another model no router sends to a worker of the other one, and no stream goes on there. */}}
{{- define "tandem.cluster" -}}
{{- if .Model }}{{ .Cluster }}{{ else }}
{{- $same := list .Release.Namespace .Release.Name }}
{{- range list "model" "dtype" "weights" "kv_dtype" }}{{ $same = append $same (get $.Values.settings .) }}{{ end }}
{{- include "tandem.name" . | trunc 30 | trimSuffix "-" }}-{{ toJson $same | sha256sum | trunc 8 }}
{{- end }}
{{- end }}

{{- /* (root, settings): the settings of a process. Numbers through toJson: YAML would write 1e+06. Sizes of pools are not
among them: a change of one pool's size must not restart the pods of the others. `prefill` only says that there is none. */}}
{{- define "tandem.settings" -}}
{{- $values := .root.Values }}
{{- $own := dict "cluster" (include "tandem.cluster" .root) "host" (include "tandem.any" .root) "metrics_port" $values.metrics_port }}
{{- if $values.cluster_tls.secret }}
{{- $own = merge $own (dict "cluster_cert" "/etc/tandem/cluster/tls.crt" "cluster_key" "/etc/tandem/cluster/tls.key" "cluster_ca" "/etc/tandem/cluster/ca.crt") }}
{{- end }}
{{- if $values.models }}{{ $_ := set $own "models" (include "tandem.models" .root | fromJson) }}
{{- else if include "tandem.no_prefill" $values }}{{ $_ := set $own "prefill" 0 }}{{ end }}
{{- with .root.Model }}{{ $_ := set $own "served_model_name" . }}{{ end }}
{{- if eq $values.orchestrator "ray" }}
{{- $_ := set $own "ray_address" (printf "%s-head-svc:6379" (include "tandem.name" .root)) }}
{{- if not $values.models }}{{ $own = merge $own (include "tandem.autoscale" $values | fromJson) }}{{ end }}
{{- end }}
{{- $own = merge $own (dict "log_format" "json") }}
{{- $given := include "tandem.over" (list $values.settings .settings) | fromJson }}
{{- $settings := include "tandem.over" (list $own $given) | fromJson }}
- {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
- {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
- {name: TANDEM_ADVERTISE_HOST, value: $(POD_IP)}
- name: TANDEM_CLUSTER_TOKEN
  valueFrom: {secretKeyRef: {name: {{ include "tandem.secret" .root }}, key: cluster_token}}
{{- if $values.valkey.enabled }}
- name: VALKEY_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ include "tandem.secret" .root }}, key: valkey_password}}
- {name: TANDEM_REDIS, value: "redis://:$(VALKEY_PASSWORD)@{{ include "tandem.name" .root }}-valkey:6379/0"}
{{- else }}
- name: TANDEM_REDIS
  valueFrom: {secretKeyRef: {name: {{ required "redis.secret: without valkey, a Secret with the URL of a registry" $values.redis.secret | quote }}, key: {{ $values.redis.key | quote }}}}
{{- end }}
{{- range $name, $value := $settings }}
- name: TANDEM_{{ upper $name }}
  value: {{ ternary $value (toJson $value) (kindIs "string" $value) | quote }}
{{- end }}
{{- end }}

{{- /* Entries of a container's `env`: a later one, as of the values, replaces an earlier one of its name. Server-side
apply refuses two of one name, and a RayCluster in any case. */}}
{{- define "tandem.once" -}}
{{- $entries := dict }}{{ $names := list }}
{{- range . | fromYamlArray }}
{{- /* What refers to others stays behind them: Kubernetes expands names of entries before it. */}}
{{- if contains "$(" (.value | default "") }}{{ $names = without $names .name }}{{ end }}
{{- if not (has .name $names) }}{{ $names = append $names .name }}{{ end }}
{{- $_ := set $entries .name . }}
{{- end }}
{{- range $names }}
- {{ get $entries . | toJson }}
{{- end }}
{{- end }}

{{- /* The environment besides the settings */}}
{{- define "tandem.env" -}}
- {name: HOME, value: /cache}
# Provides a user name, also where the platform chooses the user id.
- {name: USER, value: tandem}
- {name: HF_HOME, value: /models/hub}
{{- /* Init containers have fetched what there is to fetch. */}}
{{- if or (not .Values.model_cache.download) (include "tandem.hub_ids" . | fromJsonArray) }}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end }}
{{- end }}

{{- define "tandem.hub_token" -}}
{{- with .Values.model_cache.token }}
{{- if .secret }}
- {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: {{ .secret | quote }}, key: {{ .key | quote }}}}}
{{- end }}
{{- end }}
{{- end }}

{{- define "tandem.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /cache}
- {name: models, mountPath: /models}
{{- if .Values.cluster_tls.secret }}
- {name: cluster-tls, mountPath: /etc/tandem/cluster, readOnly: true}
{{- end }}
{{- end }}

{{- /* Whether a model is a folder, as of the cache; empty: all are hub ids */}}
{{- define "tandem.has_folder" -}}
{{- $all := list .Values.settings }}
{{- range .Values.models }}{{ $all = append $all .settings }}{{ end }}
{{- range $all }}{{ if hasPrefix "/" (default "" .model) }}yes{{ end }}{{ end }}
{{- end }}

{{- /* (root, router, none): a router needs the tokenizer only, which it fetches into a folder of its own, unless a model
is a folder of the cache. none: the pod needs nothing of a model. */}}
{{- define "tandem.volumes" -}}
- {name: tmp, emptyDir: {}}
- {name: cache, emptyDir: {}}
- name: models
{{- $fetches := and (include "tandem.hub_ids" .root | fromJsonArray) .root.Values.model_cache.download }}
{{- $own := or .none (and .router $fetches (not (include "tandem.has_folder" .root))) }}
{{- with .root.Values.model_cache }}
{{- if $own }}
  emptyDir: {sizeLimit: 1Gi}
{{- else if eq .kind "claim" }}
  persistentVolumeClaim: {claimName: {{ .claim | default (printf "%s-models" (include "tandem.name" $.root)) | quote }}}
{{- else if eq .kind "hostPath" }}
  hostPath: {path: {{ required "model_cache.hostPath: a folder of the nodes that user 10001 may write to" .hostPath | quote }}, type: Directory}
{{- else }}
  emptyDir: {sizeLimit: {{ .size | quote }}}
{{- end }}
{{- end }}
{{- with .root.Values.cluster_tls.secret }}
- {name: cluster-tls, secret: {secretName: {{ . | quote }}, defaultMode: 0440}}
{{- end }}
{{- end }}

{{- /* Hub ids that are fetched, without those that are folders */}}
{{- define "tandem.hub_ids" -}}
{{- $found := list }}
{{- $all := list .Values.settings }}
{{- range .Values.models }}{{ $all = append $all .settings }}{{ end }}
{{- range $all }}
{{- range compact (list (default "" .model) (default "" .draft_model)) }}
{{- if not (or (hasPrefix "/" .) (hasPrefix "." .)) }}{{ $found = append $found . }}{{ end }}
{{- end }}
{{- end }}
{{- toJson (uniq $found) }}
{{- end }}

{{- /* (root, weights): `org/name@revision` is fetched at that revision. */}}
{{- define "tandem.downloads" -}}
{{- $download := ternary (include "tandem.hub_ids" .root | fromJsonArray) list .root.Values.model_cache.download }}
{{- range $number, $model := $download }}
{{- $parts := splitList "@" $model }}
{{- $command := list "hf" "download" (first $parts) "--include" "*.json" "--include" "*.jinja" }}
{{- if $.weights }}{{ $command = concat $command (list "--include" "*.safetensors") }}{{ end }}
{{- with rest $parts }}{{ $command = concat $command (list "--revision" (first .)) }}{{ end }}
- name: model-{{ $number }}
  image: {{ include "tandem.image" (dict "root" $.root "image" "router") }}
  imagePullPolicy: {{ $.root.Values.image.pullPolicy }}
  command: {{ toJson $command }}
  env:
    {{- include "tandem.once" (include "tandem.download.env" $.root) | nindent 4 }}
  resources: {{- toYaml $.root.Values.model_cache.job.resources | nindent 4 }}
  securityContext: {{- include "tandem.hardened" $.root | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: cache, mountPath: /cache}
    - {name: models, mountPath: /models}
{{- end }}
{{- end }}

{{- define "tandem.download.env" -}}
- {name: HOME, value: /cache}
- {name: HF_HOME, value: /models/hub}
- {name: HF_HUB_DISABLE_UPDATE_CHECK, value: "1"}
{{ include "tandem.hub_token" . }}
{{- with .Values.model_cache.job.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* (root, component, of): labels and annotations of pods. Selectors win over the user's. */}}
{{- define "tandem.metadata" -}}
labels: {{- merge (include "tandem.selector" . | fromYaml) (.of.podLabels | default dict) | toYaml | nindent 2 }}
{{- $annotations := merge (dict) (.of.podAnnotations | default dict) (.annotations | default dict) }}
{{- with $annotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Who a pod is, and where its images come from */}}
{{- define "tandem.identity" -}}
serviceAccountName: {{ .account | default (include "tandem.account" .root) }}
automountServiceAccountToken: {{ .token | default false }}
# Otherwise Kubernetes would add variables that look like settings: TANDEM_ROUTER_PORT for a Service "tandem-router".
enableServiceLinks: false
securityContext: {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end }}

{{- /* (root, component, of: a pool, the router...; ray; token: whether it asks Kubernetes; account: if not the release's):
what all pods of ours have */}}
{{- define "tandem.pod" -}}
{{- include "tandem.identity" . }}
{{- if .of.hostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{- with .of.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .of.schedulerName }}
schedulerName: {{ . | quote }}
{{- end }}
{{- with .of.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with .of.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.resourceClaims }}
resourceClaims: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.topologySpread }}
topologySpreadConstraints:
  {{- range . }}
  - maxSkew: 1
    topologyKey: {{ . | quote }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "tandem.selector" $ | nindent 8 }}
    {{- if not $.ray }}
    matchLabelKeys: [pod-template-hash]
    {{- end }}
  {{- end }}
{{- end }}
{{- end }}

{{- /* (of, startup_s): the probes of a process of ours. It may fail the first one for as long as it may take to start. */}}
{{- define "tandem.probes" -}}
{{- $ready := dict "httpGet" (dict "path" "/readyz" "port" "metrics") }}
{{- $alive := dict "httpGet" (dict "path" "/healthz" "port" "metrics") }}
startupProbe: {{ merge (dict "failureThreshold" (ceil (divf .startup_s .of.startup.periodSeconds))) $ready .of.startup | toJson }}
readinessProbe: {{ merge (dict) $ready .of.readiness | toJson }}
livenessProbe: {{ merge (dict) $alive .of.liveness | toJson }}
{{- end }}

{{- define "tandem.pdb" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "tandem.component" . }}
  labels: {{- include "tandem.labels" . | nindent 4 }}
spec:
  {{- if not (kindIs "invalid" .of.pdb.minAvailable) }}
  minAvailable: {{ .of.pdb.minAvailable }}
  {{- else }}
  maxUnavailable: {{ .of.pdb.maxUnavailable }}
  {{- end }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- include "tandem.selector" . | nindent 6 }}
{{- end }}

{{- /* Of a claim; "-": none, for volumes made by hand */}}
{{- define "tandem.storage_class" -}}
{{- with . }}storageClassName: {{ ternary "" . (eq . "-") | quote }}{{ end }}
{{- end }}
