{{- /* A pool: a Deployment whose pods are one worker each. (root, component, of: its values) */}}
{{- define "tandem.pool" -}}
{{- $values := .root.Values }}
{{- $name := printf "%s-%s" (include "tandem.name" .root) .component }}
{{- $settings := mergeOverwrite (dict "drain_grace_s" 30) $values.settings .of.settings }}
{{- $rdma := gt (int .of.rdma.count) 0 }}
{{- $limits := deepCopy (.of.resources.limits | default dict) }}
{{- if .of.gpu.count }}{{ $_ := set $limits .of.gpu.resource (.of.gpu.count | toString) }}{{ end }}
{{- if $rdma }}{{ $_ := set $limits .of.rdma.resource (.of.rdma.count | toString) }}{{ end }}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $name }}
  labels: {{- include "tandem.labels" . | nindent 4 }}
spec:
  {{- if eq .of.autoscaling.kind "none" }}
  replicas: {{ .of.replicas }}
  {{- end }}
  strategy:
    type: RollingUpdate
    rollingUpdate: {{- toYaml .of.strategy | nindent 6 }}
  selector:
    matchLabels: {{- include "tandem.selector" . | nindent 6 }}
  template:
    metadata:
      labels: {{- include "tandem.selector" . | nindent 8 }}
      annotations: {kubectl.kubernetes.io/default-container: worker}
    spec:
      {{- include "tandem.pod" . | nindent 6 }}
      {{- with .of.runtimeClassName }}
      runtimeClassName: {{ . }}
      {{- end }}
      # SIGTERM starts the drain: requests that still run after drain_grace_s continue elsewhere, with the same tokens.
      terminationGracePeriodSeconds: {{ add (ceil $settings.drain_grace_s) 15 }}
      {{- $before := include "tandem.downloads" .root }}
      {{- if or $before $values.ray.enabled }}
      initContainers:
        {{- $before | nindent 8 }}
        {{- if $values.ray.enabled }}{{ include "tandem.ray.node" . | nindent 8 }}{{ end }}
      {{- end }}
      containers:
        - name: worker
          image: {{ include "tandem.image" (dict "root" .root "image" "worker") }}
          imagePullPolicy: {{ $values.image.pullPolicy }}
          command: [python, -m, services, {{ .component }}, $(POD_NAME)]
          env:
            {{- include "tandem.env" (dict "root" .root "settings" .of.settings) | nindent 12 }}
            - {name: TANDEM_WORKER_PORT, value: {{ $values.worker_port | quote }}}
            {{- if not (or (hasKey $values.settings "threads") (hasKey .of.settings "threads")) }}
            # As many as the pod requests, rounded up; without a request all cores of the node, divided by its workers.
            - {name: TANDEM_THREADS, valueFrom: {resourceFieldRef: {containerName: worker, resource: requests.cpu, divisor: "1"}}}
            {{- end }}
            {{- if or (not $values.model_cache.download) (include "tandem.hub_ids" .root | fromJsonArray) }}
            - {name: HF_HUB_OFFLINE, value: "1"}
            {{- end }}
            {{- range $key, $value := $values.ucx }}
            - {name: {{ $key }}, value: {{ $value | quote }}}
            {{- end }}
            {{- with .of.env }}{{ toYaml . | nindent 12 }}{{ end }}
          ports:
            - {name: grpc, containerPort: {{ $values.worker_port }}}
            - {name: metrics, containerPort: {{ $values.metrics_port }}}
          {{- if $values.cluster_tls.secret }}
          # kubelet's gRPC probes do not support certificates.
          startupProbe: {tcpSocket: {port: grpc}, periodSeconds: 5, failureThreshold: {{ ceil (divf .of.startup_s 5) }}}
          readinessProbe: {tcpSocket: {port: grpc}, periodSeconds: 5}
          {{- else }}
          startupProbe: {grpc: {port: {{ $values.worker_port }}}, periodSeconds: 5, failureThreshold: {{ ceil (divf .of.startup_s 5) }}}
          readinessProbe: {grpc: {port: {{ $values.worker_port }}, service: tandem.v1.WorkerService}, periodSeconds: 5, timeoutSeconds: 3}
          livenessProbe: {grpc: {port: {{ $values.worker_port }}}, periodSeconds: 10, timeoutSeconds: 10, failureThreshold: 6}
          {{- end }}
          resources:
            {{- with .of.resources.requests }}
            requests: {{- toYaml . | nindent 14 }}
            {{- end }}
            {{- with $limits }}
            limits: {{- toYaml . | nindent 14 }}
            {{- end }}
          terminationMessagePolicy: FallbackToLogsOnError
          securityContext:
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities: {drop: [ALL]{{ if $rdma }}, add: [IPC_LOCK]{{ end }}}
          volumeMounts:
            {{- include "tandem.mounts" .root | nindent 12 }}
            - {name: shm, mountPath: /dev/shm}
      volumes:
        {{- include "tandem.volumes" .root | nindent 8 }}
        - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ .of.shm }}}}
---
{{ include "tandem.pdb" . }}
{{- with .of.autoscaling }}
{{- if ne .kind "none" }}
---
{{- $signal := get (dict "prefill" "tandem_prefill_backlog_seconds" "decode" "tandem_kv_cache_usage_ratio") $.component }}
{{- if eq .kind "hpa" }}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ $name }}
  labels: {{- include "tandem.labels" $ | nindent 4 }}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: {{ $name }}}
  minReplicas: {{ .min }}
  maxReplicas: {{ .max }}
  metrics:
    - type: Pods
      pods:
        metric: {name: {{ $signal }}}
        target: {type: AverageValue, averageValue: {{ printf "%dm" (mulf .target 1000 | int) }}}
  behavior: {{- include "tandem.pool.behavior" $ | nindent 4 }}
{{- else }}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  name: {{ $name }}
  labels: {{- include "tandem.labels" $ | nindent 4 }}
spec:
  scaleTargetRef: {name: {{ $name }}}
  minReplicaCount: {{ .min }}
  maxReplicaCount: {{ .max }}
  # Where Prometheus does not answer, the pool keeps its size.
  fallback: {failureThreshold: 3, replicas: {{ .min }}, behavior: currentReplicasIfHigher}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior: {{- include "tandem.pool.behavior" $ | nindent 8 }}
  triggers:
    - type: prometheus
      metricType: AverageValue
      metadata:
        serverAddress: {{ required "prometheus.url: where KEDA asks" $values.prometheus.url }}
        query: sum({{ $signal }}{namespace={{ $.root.Release.Namespace | quote }},tandem={{ include "tandem.name" $.root | quote }},pool={{ $.component | quote }}})
        threshold: {{ toJson .target | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- /* A worker takes minutes to load, so up a pod at a time; down slowly, because each pod drains. */}}
{{- define "tandem.pool.behavior" -}}
scaleUp:
  policies: [{type: Pods, value: 1, periodSeconds: 60}]
scaleDown:
  stabilizationWindowSeconds: 300
  policies: [{type: Pods, value: 1, periodSeconds: 300}]
{{- end }}
