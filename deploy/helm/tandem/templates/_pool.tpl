{{- /* (root, component, of): the pod of a worker, without what starts the worker. */}}
{{- define "tandem.worker.volumes" -}}
{{- include "tandem.volumes" (dict "root" .root "router" false) }}
- {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ .of.shm | quote }}}}
{{- with .of.volumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "tandem.worker.mounts" -}}
{{- include "tandem.mounts" .root }}
- {name: shm, mountPath: /dev/shm}
{{- with .of.volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* The environment that the libraries read */}}
{{- define "tandem.worker.env" -}}
{{- include "tandem.env" .root }}
{{- range $key, $value := .root.Values.ucx }}
- {name: {{ $key }}, value: {{ $value | quote }}}
{{- end }}
{{- with .of.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Without a driver that works a worker whose device is `auto` would serve on the CPU of a pod with a GPU. */}}
{{- define "tandem.worker.device" -}}
{{- $given := or (hasKey .root.Values.settings "device") (hasKey .of.settings "device") }}
{{- if and (or .of.gpu.count .of.resourceClaims) (not $given) }}
- {name: TANDEM_DEVICE, value: cuda}
{{- end }}
{{- end }}

{{- /* (of: a pool, settings) */}}
{{- define "tandem.worker.all_env" -}}
{{- $settings := include "tandem.settings" (dict "root" .of.root "settings" .settings) }}
{{- $parts := list $settings (include "tandem.worker.device" .of) (include "tandem.worker.port" .of) (include "tandem.worker.env" .of) }}
{{- join "\n" $parts }}
{{- end }}

{{- define "tandem.worker.port" -}}
- {name: TANDEM_WORKER_PORT, value: {{ .root.Values.worker_port | quote }}}
{{- if not (or (hasKey .root.Values.settings "threads") (hasKey .of.settings "threads")) }}
# As many as the pod requests, rounded up; without a request half of the node's cores.
- {name: TANDEM_THREADS, valueFrom: {resourceFieldRef: {containerName: worker, resource: requests.cpu, divisor: "1"}}}
{{- end }}
{{- end }}

{{- define "tandem.worker.ports" -}}
- {name: grpc, containerPort: {{ .root.Values.worker_port }}}
- {name: metrics, containerPort: {{ .root.Values.metrics_port }}}
{{- end }}

{{- define "tandem.worker.resources" -}}
{{- if gt (int .of.gpu.count) 1 }}
{{- fail (printf "pools.%s.gpu.count: %d, but a pod is one worker, and a worker uses one GPU: the others would idle; set 1, and more replicas" .component (int .of.gpu.count)) }}
{{- end }}
{{- $limits := deepCopy (.of.resources.limits | default dict) }}
{{- if .of.gpu.count }}{{ $_ := set $limits .of.gpu.resource (.of.gpu.count | toString) }}{{ end }}
{{- if .of.rdma.count }}{{ $_ := set $limits .of.rdma.resource (.of.rdma.count | toString) }}{{ end }}
{{- with .of.resources.requests }}
requests: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $limits }}
limits: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.resourceClaims }}
claims:
  {{- range . }}
  - name: {{ .name | quote }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "tandem.worker.security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]{{ if .of.rdma.count }}, add: [IPC_LOCK]{{ end }}}
{{- end }}

{{- define "tandem.worker.grace" -}}
{{ add (ceil (mergeOverwrite (dict "drain_grace_s" 30) .root.Values.settings .of.settings).drain_grace_s) 15 }}
{{- end }}

{{- /* A pool: a Deployment whose pods are one worker each. (root, component, of: its values) */}}
{{- define "tandem.pool" -}}
{{- $values := .root.Values }}
{{- $name := include "tandem.component" . }}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $name }}
  labels: {{- include "tandem.labels" . | nindent 4 }}
spec:
  {{- include "tandem.replicas" (dict "root" .root "name" $name "of" .of) | nindent 2 }}
  # A pod may be loading for startup_s after its model has been fetched.
  progressDeadlineSeconds: {{ add .of.startup_s 600 }}
  strategy:
    type: RollingUpdate
    rollingUpdate: {{- toYaml .of.strategy | nindent 6 }}
  selector:
    matchLabels: {{- include "tandem.selector" . | nindent 6 }}
  template:
    metadata:
      {{- include "tandem.metadata" (merge (dict "annotations" (dict "kubectl.kubernetes.io/default-container" "worker")) .) | nindent 6 }}
    spec:
      {{- include "tandem.pod" . | nindent 6 }}
      # SIGTERM starts the drain: requests that still run after drain_grace_s continue elsewhere, with the same tokens.
      terminationGracePeriodSeconds: {{ include "tandem.worker.grace" . }}
      {{- with include "tandem.downloads" (dict "root" .root "weights" true) }}
      initContainers:
        {{- . | nindent 8 }}
      {{- end }}
      containers:
        - name: worker
          image: {{ include "tandem.image" (dict "root" .root "image" "worker") }}
          imagePullPolicy: {{ $values.image.pullPolicy }}
          command: [python, -m, services, {{ .component }}, $(POD_NAME)]
          env:
            {{- include "tandem.once" (include "tandem.worker.all_env" (dict "of" . "settings" .of.settings)) | nindent 12 }}
          ports:
            {{- include "tandem.worker.ports" . | nindent 12 }}
          {{- include "tandem.probes" (dict "of" .of.probes "startup_s" .of.startup_s) | nindent 10 }}
          resources: {{- include "tandem.worker.resources" . | nindent 12 }}
          terminationMessagePolicy: FallbackToLogsOnError
          securityContext: {{- include "tandem.worker.security" . | nindent 12 }}
          volumeMounts:
            {{- include "tandem.worker.mounts" . | nindent 12 }}
      volumes:
        {{- include "tandem.worker.volumes" . | nindent 8 }}
---
{{ include "tandem.pdb" . }}
{{- if ne .of.autoscaling.kind "none" }}
---
{{ include "tandem.pool.scaler" (dict "root" .root "component" .component "name" $name "of" .of.autoscaling) }}
{{- end }}
{{- end }}

{{- /* Both pools of a model */}}
{{- define "tandem.pools" -}}
{{- range $component, $pool := .Values.pools }}
---
{{ include "tandem.pool" (dict "root" $ "component" $component "of" $pool) }}
{{- end }}
{{- end }}

{{- /* (root, name, of: replicas and autoscaling): the size of this Deployment. A scaler's is that of the live one: where the
last revision had `replicas` and this one had none, Helm would remove it, and Kubernetes makes that 1. */}}
{{- define "tandem.replicas" -}}
{{- $live := (lookup "apps/v1" "Deployment" .root.Release.Namespace .name).spec | default dict }}
{{- if eq .of.autoscaling.kind "none" -}}
replicas: {{ .of.replicas }}
{{- else if hasKey $live "replicas" -}}
replicas: {{ $live.replicas }}
{{- else -}}
# replicas: of its scaler
{{- end }}
{{- end }}

{{- /* What sizes a pool: an HPA or KEDA. Of several signals the one that wants most wins. */}}
{{- define "tandem.pool.scaler" -}}
{{- if and .of.triggers (ne .of.kind "keda") }}{{ fail (printf "pools.%s.autoscaling.triggers: are KEDA's, kind is %s" .component .of.kind) }}{{ end }}
{{- $signals := get (dict "prefill" (list "tandem_prefill_backlog_seconds") "decode" (list "tandem_kv_cache_usage_ratio" "tandem_places_usage_ratio")) .component }}
{{- if eq .of.kind "hpa" }}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ .name }}
  labels: {{- include "tandem.labels" . | nindent 4 }}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: {{ .name }}}
  minReplicas: {{ .of.min }}
  maxReplicas: {{ .of.max }}
  metrics:
    {{- range $signals }}
    - type: Pods
      pods:
        metric: {name: {{ . }}}
        target: {type: AverageValue, averageValue: {{ printf "%dm" (mulf $.of.target 1000 | int) }}}
    {{- end }}
  behavior: {{- toYaml .of.behavior | nindent 4 }}
{{- else if eq .of.kind "keda" }}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  name: {{ .name }}
  labels: {{- include "tandem.labels" . | nindent 4 }}
spec:
  scaleTargetRef: {name: {{ .name }}}
  minReplicaCount: {{ .of.min }}
  maxReplicaCount: {{ .of.max }}
  # Where Prometheus does not answer, or has no samples, the pool keeps its size.
  fallback: {failureThreshold: 3, replicas: {{ .of.min }}, behavior: currentReplicasIfHigher}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior: {{- toYaml .of.behavior | nindent 8 }}
  triggers:
    {{- range $signals }}
    - type: prometheus
      metricType: AverageValue
      metadata:
        serverAddress: {{ required "prometheus.url: where KEDA asks" $.root.Values.prometheus.url | quote }}
        query: sum({{ . }}{namespace={{ $.root.Release.Namespace | quote }},tandem={{ include "tandem.name" $.root | quote }},pool={{ $.component | quote }}{{ with $.root.Model }},model={{ $.root.Values.settings.served_model_name | default . | splitList "," | first | quote }}{{ end }}})
        threshold: {{ toJson $.of.target | quote }}
        ignoreNullValues: "false"
    {{- end }}
    {{- with .of.triggers }}{{ toYaml . | nindent 4 }}{{ end }}
{{- else }}
{{- fail (printf "pools.%s.autoscaling.kind: tandem needs orchestrator: ray; hpa and keda scale Deployments" .component) }}
{{- end }}
{{- end }}
