{{- define "tandem.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-{{ .Chart.Name }}{{ end }}
{{- end }}

{{- /* (root, component): what a Deployment selects; never to be changed */}}
{{- define "tandem.selector" -}}
app.kubernetes.io/name: tandem
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
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
{{ with $image.registry }}{{ . }}/{{ end }}{{ get $image .image }}:{{ $image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{- define "tandem.secret" -}}
{{ .Values.secret | default (include "tandem.name" .) }}
{{- end }}

{{- define "tandem.hardened" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- /* The name under which processes find each other. It has what an answer depends on in it, so that in the middle of an
upgrade to another model no router sends to a worker of the other one, and no stream goes on there. */}}
{{- define "tandem.cluster" -}}
{{- $same := list .Release.Namespace .Release.Name }}
{{- range list "model" "dtype" "weights" "kv_dtype" }}{{ $same = append $same (get $.Values.settings .) }}{{ end }}
{{- include "tandem.name" . | trunc 30 | trimSuffix "-" }}-{{ toJson $same | sha256sum | trunc 8 }}
{{- end }}

{{- /* (root, settings): the environment of every process of ours. Numbers through toJson: YAML would write 1e+06. */}}
{{- define "tandem.env" -}}
{{- $values := .root.Values }}
{{- $own := dict "cluster" (include "tandem.cluster" .root) "host" "0.0.0.0" "metrics_port" $values.metrics_port "prefill" $values.pools.prefill.replicas "decode" $values.pools.decode.replicas }}
{{- if $values.cluster_tls.secret }}
{{- $own = merge $own (dict "cluster_cert" "/etc/tandem/cluster/tls.crt" "cluster_key" "/etc/tandem/cluster/tls.key" "cluster_ca" "/etc/tandem/cluster/ca.crt") }}
{{- end }}
{{- $own = merge $own (dict "log_format" "json") }}
{{- $settings := merge (dict) .settings $values.settings $own }}
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
  valueFrom: {secretKeyRef: {name: {{ required "redis.secret: without valkey, a Secret with the URL of a registry" $values.redis.secret }}, key: {{ $values.redis.key }}}}
{{- end }}
{{- range $name, $value := $settings }}
- name: TANDEM_{{ upper $name }}
  value: {{ ternary $value (toJson $value) (kindIs "string" $value) | quote }}
{{- end }}
- {name: HOME, value: /cache}
# Provides a user name, also where the platform chooses the user id.
- {name: USER, value: tandem}
- {name: HF_HOME, value: /models/hub}
{{- with $values.model_cache.token }}
{{- if .secret }}
- {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: {{ .secret }}, key: {{ .key }}}}}
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

{{- define "tandem.volumes" -}}
- {name: tmp, emptyDir: {}}
- {name: cache, emptyDir: {}}
- name: models
{{- with .Values.model_cache }}
{{- if eq .kind "claim" }}
  persistentVolumeClaim: {claimName: {{ .claim | default (printf "%s-models" (include "tandem.name" $)) }}}
{{- else if eq .kind "hostPath" }}
  hostPath: {path: {{ required "model_cache.hostPath: a folder of the nodes that user 10001 may write to" .hostPath }}, type: Directory}
{{- else }}
  emptyDir: {sizeLimit: {{ .size }}}
{{- end }}
{{- end }}
{{- with .Values.cluster_tls.secret }}
- {name: cluster-tls, secret: {secretName: {{ . }}, defaultMode: 0440}}
{{- end }}
{{- end }}

{{- /* Hub ids that are fetched, without those that are folders */}}
{{- define "tandem.hub_ids" -}}
{{- $found := list }}
{{- range compact (list .Values.settings.model (default "" .Values.settings.draft_model)) }}
{{- if not (or (hasPrefix "/" .) (hasPrefix "." .)) }}{{ $found = append $found . }}{{ end }}
{{- end }}
{{- toJson $found }}
{{- end }}

{{- define "tandem.downloads" -}}
{{- $download := ternary (include "tandem.hub_ids" . | fromJsonArray) list .Values.model_cache.download }}
{{- range $number, $model := $download }}
- name: model-{{ $number }}
  image: {{ include "tandem.image" (dict "root" $ "image" "router") }}
  imagePullPolicy: {{ $.Values.image.pullPolicy }}
  command: [hf, download, {{ $model | quote }}, --include, "*.safetensors", --include, "*.json", --include, "*.jinja"]
  env:
    - {name: HOME, value: /cache}
    - {name: HF_HOME, value: /models/hub}
    - {name: HF_HUB_DISABLE_UPDATE_CHECK, value: "1"}
    {{- with $.Values.model_cache.token }}
    {{- if .secret }}
    - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: {{ .secret }}, key: {{ .key }}}}}
    {{- end }}
    {{- end }}
  resources: {requests: {cpu: 500m, memory: 512Mi}, limits: {memory: 4Gi}}
  securityContext: {{- include "tandem.hardened" $ | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: cache, mountPath: /cache}
    - {name: models, mountPath: /models}
{{- end }}
{{- end }}

{{- /* (root, component, ...of: a pool or the router): what both kinds of pods have */}}
{{- define "tandem.pod" -}}
serviceAccountName: {{ include "tandem.name" .root }}
automountServiceAccountToken: false
# Otherwise Kubernetes would add variables that look like settings: TANDEM_ROUTER_PORT for a Service "tandem-router".
enableServiceLinks: false
securityContext: {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
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
topologySpreadConstraints:
  {{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "tandem.selector" $ | nindent 8 }}
    matchLabelKeys: [pod-template-hash]
  {{- end }}
{{- end }}

{{- define "tandem.pdb" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "tandem.name" .root }}-{{ .component }}
  labels: {{- include "tandem.labels" . | nindent 4 }}
spec:
  {{- toYaml .of.pdb | nindent 2 }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- include "tandem.selector" . | nindent 6 }}
{{- end }}
