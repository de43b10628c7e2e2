{{- /* Pods of a RayCluster. KubeRay replaces none when its template changes; the Job of an upgrade does, which knows a former
pod by an annotation with the digest of its template. */}}

{{- /* (root, roots: one for each model, clusters: of all models, here: Ray's address in this pod, sizes: whether it has the
pools' initial sizes, digest) */}}
{{- define "tandem.ray.head" -}}
{{- $release := .root }}
{{- $values := .root.Values }}
{{- $name := include "tandem.name" .root }}
{{- $clusters := .clusters }}
{{- $here := .here }}
{{- $this := dict "root" .root "component" "head" "of" .root.Values.ray.head "ray" true "annotations" (dict "tandem/template" .digest) }}
metadata:
  {{- include "tandem.metadata" $this | nindent 2 }}
spec:
  {{- /* With KubeRay's account: the autoscaler asks for pods. */}}
  {{- include "tandem.pod" (merge (dict "token" true) $this) | nindent 2 }}
  # To find the head's node, Ray's library looks for the process of its raylet, which is in another container.
  shareProcessNamespace: true
  # Each starts a supervisor, which outlives it, and watches it. As sidecars they are started again when they end:
  # with Ray's autoscaler v2 KubeRay restarts no container of a pod, and replaces a pod only if Ray has ended.
  initContainers:
    {{- range $root := .roots }}
    {{- $pools := $root.Values.pools }}
    - name: driver{{ with $root.Model }}-{{ . }}{{ end }}
      restartPolicy: Always
      image: {{ include "tandem.image" (dict "root" $release "image" "worker") }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      command: [python, -m, cluster.kuberay.driver]
      env:
        {{- $driver := dict "root" $root "values" $values "pools" $pools "here" $here "object" $name "clusters" $clusters "sizes" $.sizes }}
        {{- $parts := list (include "tandem.ray.env" $release) (include "tandem.ray.driver.env" $driver) }}
        {{- with $values.ray.head.env }}{{ $parts = append $parts (toYaml .) }}{{ end }}
        {{- include "tandem.once" (join "\n" $parts) | nindent 8 }}
      resources: {{- toYaml $values.ray.head.driver_resources | nindent 8 }}
      terminationMessagePolicy: FallbackToLogsOnError
      securityContext: {{- include "tandem.hardened" $release | nindent 8 }}
      volumeMounts:
        {{- include "tandem.mounts" $release | nindent 8 }}
        - {name: shm, mountPath: /dev/shm}
        - {name: ray, mountPath: /tmp/ray}
        {{- with $values.ray.head.volumeMounts }}{{ toYaml . | nindent 8 }}{{ end }}
    {{- end }}
  containers:
    - name: head
      image: {{ include "tandem.image" (dict "root" $release "image" "worker") }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      env:
        {{- $parts := list (include "tandem.ray.env" $release) (include "tandem.env" $release) }}
        {{- with $values.ray.head.env }}{{ $parts = append $parts (toYaml .) }}{{ end }}
        {{- include "tandem.once" (join "\n" $parts) | nindent 8 }}
      ports:
        - {name: gcs-server, containerPort: 6379}
      # The images have no dashboard, whose agent KubeRay's own probes would ask.
      readinessProbe: {tcpSocket: {port: gcs-server}, periodSeconds: 5}
      livenessProbe: {tcpSocket: {port: gcs-server}, initialDelaySeconds: 30, periodSeconds: 10}
      resources: {{- toYaml $values.ray.head.resources | nindent 8 }}
      securityContext: {{- include "tandem.hardened" $release | nindent 8 }}
      volumeMounts:
        {{- include "tandem.mounts" $release | nindent 8 }}
        - {name: shm, mountPath: /dev/shm}
        - {name: ray, mountPath: /tmp/ray}
        {{- with $values.ray.head.volumeMounts }}{{ toYaml . | nindent 8 }}{{ end }}
  volumes:
    {{- include "tandem.volumes" (dict "root" $release "none" true) | nindent 4 }}
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: 256Mi}}
    # Ray's sockets, which all three containers need; KubeRay would mount a folder of its own in two of them.
    - {name: ray, emptyDir: {}}
    {{- with $values.ray.head.volumes }}{{ toYaml . | nindent 4 }}{{ end }}
{{- end }}

{{- /* (root, component): the name of its group */}}
{{- define "tandem.ray.group" -}}
{{ with .root.Model }}{{ . }}-{{ end }}{{ .component }}
{{- end }}

{{- /* (root, values, pools, here, object, clusters, sizes) */}}
{{- define "tandem.ray.driver.env" -}}
{{- $settings := dict "drain_grace_s" (include "tandem.ray.grace" .pools | float64) "ray_address" .here }}
{{- include "tandem.settings" (dict "root" .root "settings" $settings) }}
{{ include "tandem.env" .root }}
- {name: POOL_OBJECTS, value: "{{ .object }}{{ with .root.Model }}-{{ . }}{{ end }}"}
- {name: RELEASE_CLUSTERS, value: {{ toJson .clusters | quote }}}
{{- if .values.ray.switch_roles }}
- {name: EITHER_POOL, value: "1"}
{{- end }}
{{- if .values.ray.spares }}
- {name: TANDEM_SPARES, value: {{ .values.ray.spares | quote }}}
{{- end }}
- {name: TANDEM_START_TIMEOUT_S, value: {{ max .pools.prefill.startup_s .pools.decode.startup_s | quote }}}
{{- if and .sizes (not (has "tandem" (list .pools.prefill.autoscaling.kind .pools.decode.autoscaling.kind))) }}
{{- if .pools.prefill.replicas }}
- {name: TANDEM_PREFILL, value: {{ .pools.prefill.replicas | quote }}}
{{- end }}
- {name: TANDEM_DECODE, value: {{ .pools.decode.replicas | quote }}}
{{- end }}
{{- end }}

{{- /* (root, component, of, digest) */}}
{{- define "tandem.ray.worker" -}}
{{- $root := .root }}
{{- $values := .root.Values }}
{{- $pool := .of }}
{{- $grace := include "tandem.ray.grace" .root.Values.pools | float64 }}
{{- $group := dict "root" .root "component" .component "of" .of "ray" true "annotations" (dict "tandem/template" .digest) }}
metadata:
  {{- include "tandem.metadata" $group | nindent 2 }}
spec:
  {{- include "tandem.pod" $group | nindent 2 }}
  # The supervisor drains with the longest grace of both pools.
  terminationGracePeriodSeconds: {{ add (ceil $grace) 30 }}
  {{- with include "tandem.downloads" (dict "root" $root "weights" true) }}
  initContainers:
    {{- . | nindent 4 }}
  {{- end }}
  containers:
    # KubeRay makes its command, `ray start`.
    - name: worker
      image: {{ include "tandem.image" (dict "root" $root "image" "worker") }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      env:
        {{- /* Workers read their settings from here (services/pod_launch.py). */}}
        {{- $settings := include "tandem.over" (list $pool.settings (dict "drain_grace_s" $grace)) | fromJson }}
        {{- $of_worker := include "tandem.worker.all_env" (dict "of" $group "settings" $settings) }}
        {{- include "tandem.once" (printf "%s\n%s" (include "tandem.ray.env" $root) $of_worker) | nindent 8 }}
      ports:
        {{- include "tandem.worker.ports" $group | nindent 8 }}
        - {name: raylet, containerPort: 6380}
      # Ends when its worker has drained, and another one has been asked for elsewhere.
      lifecycle: {preStop: {exec: {command: [python, -m, cluster.kuberay.leave]}}}
      # Of the node, which may have no worker; the supervisor watches its worker.
      readinessProbe: {{ merge (dict "tcpSocket" (dict "port" "raylet")) $pool.probes.readiness | toJson }}
      livenessProbe: {{ merge (dict "tcpSocket" (dict "port" "raylet") "initialDelaySeconds" 30) $pool.probes.liveness | toJson }}
      resources: {{- include "tandem.worker.resources" $group | nindent 8 }}
      terminationMessagePolicy: FallbackToLogsOnError
      securityContext: {{- include "tandem.worker.security" $group | nindent 8 }}
      volumeMounts:
        {{- include "tandem.worker.mounts" $group | nindent 8 }}
  volumes:
    {{- include "tandem.worker.volumes" $group | nindent 4 }}
{{- end }}

{{- /* (text: a template, with: what else KubeRay makes the pod of): of its content, not of its comments */}}
{{- define "tandem.ray.digest" -}}
{{ printf "%s %s" (.text | fromYaml | toJson) (toJson .with) | sha256sum | trunc 8 }}
{{- end }}

{{- /* As tandem.ray.worker, and resources: of all but sizes, which only the driver reads. No prefill workers at all is no
size: decode workers then compute prompts. */}}
{{- define "tandem.ray.worker.digest" -}}
{{- $text := regexReplaceAll `- {"name":"TANDEM_(PREFILL|DECODE)(_MAX)?","value":"[1-9].*` (include "tandem.ray.worker" .) "" }}
{{- include "tandem.ray.digest" (dict "text" $text "with" .resources) }}
{{- end }}

{{- /* (root, component): what a node of its group offers (cluster/placement.py, Placement.resource): its pool; or both
pools, for one worker of either, which takes both. As JSON. */}}
{{- define "tandem.ray.resources" -}}
{{- $of := "" }}
{{- with .root.Cluster }}{{ $of = printf "%s-" (splitList "." . | last) }}{{ end }}
{{- $resources := dict (printf "%s%s" $of .component) "1" }}
{{- if .root.Values.ray.switch_roles }}{{ $resources = dict (printf "%sprefill" $of) "1" (printf "%sdecode" $of) "1" }}{{ end }}
{{- toJson $resources }}
{{- end }}

{{- /* The Job's own account, if the chart creates accounts: it may delete pods, and no other pod may */}}
{{- define "tandem.ray.upgrade.account" -}}
{{- if .Values.serviceAccount.create }}{{ printf "%s-upgrade" (include "tandem.name" .) | quote }}{{ else }}{{ include "tandem.account" . }}{{ end }}
{{- end }}

{{- /* (root, release: of cluster/kuberay/upgrade.py): the pod of the Job of an upgrade */}}
{{- define "tandem.ray.upgrade" -}}
{{- $this := dict "root" .root "component" "upgrade" "of" (pick .root.Values.router "priorityClassName" "nodeSelector" "tolerations") }}
metadata:
  {{- include "tandem.metadata" $this | nindent 2 }}
spec:
  {{- include "tandem.pod" (merge (dict "token" true "account" (include "tandem.ray.upgrade.account" .root)) $this) | nindent 2 }}
  restartPolicy: Never  # the pod of a Job that failed keeps its log
  containers:
    - name: upgrade
      image: {{ include "tandem.image" (dict "root" .root "image" "router") }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      command: [python, -m, cluster.kuberay.upgrade]
      env:
        {{- $parts := list (include "tandem.settings" (dict "root" .root "settings" dict)) }}
        {{- /* The user's own registry may need a file, which routers have, too. */}}
        {{- with .root.Values.router.env }}{{ $parts = append $parts (toYaml .) }}{{ end }}
        {{- $parts = append $parts (printf "- {name: HOME, value: /tmp}\n- {name: UPGRADE, value: %s}" (toJson .release | quote)) }}
        {{- include "tandem.once" (join "\n" $parts) | nindent 8 }}
      resources: {requests: {cpu: 50m, memory: 128Mi}, limits: {memory: 512Mi}}
      terminationMessagePolicy: FallbackToLogsOnError
      securityContext: {{- include "tandem.hardened" .root | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        {{- if .root.Values.cluster_tls.secret }}
        - {name: cluster-tls, mountPath: /etc/tandem/cluster, readOnly: true}
        {{- end }}
        {{- with .root.Values.router.volumeMounts }}{{ toYaml . | nindent 8 }}{{ end }}
  volumes:
    - {name: tmp, emptyDir: {}}
    {{- with .root.Values.cluster_tls.secret }}
    - {name: cluster-tls, secret: {secretName: {{ . | quote }}, defaultMode: 0440}}
    {{- end }}
    {{- with .root.Values.router.volumes }}{{ toYaml . | nindent 4 }}{{ end }}
{{- end }}

{{- /* (pools): the longest grace of both, with which the supervisor drains */}}
{{- define "tandem.ray.grace" -}}
{{- $grace := 0.0 }}
{{- range . }}{{ $grace = maxf $grace (ternary (get .settings "drain_grace_s") 30 (hasKey .settings "drain_grace_s")) }}{{ end }}
{{- $grace }}
{{- end }}
{{- define "tandem.ray.env" -}}
- {name: RAY_AUTH_MODE, value: token}
- {name: RAY_AUTH_TOKEN, valueFrom: {secretKeyRef: {name: {{ include "tandem.secret" . }}, key: ray_token}}}
# A worker is its actor's process; Ray must not restart it for memory that the pod's limit already bounds.
- {name: RAY_memory_monitor_refresh_ms, value: "0"}
- {name: RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO, value: "0"}
# Ray's processes, workers and the supervisor among them, write to the container's log, and no files of their own.
- {name: RAY_LOG_TO_STDERR, value: "1"}
- {name: RAY_BACKEND_LOG_LEVEL, value: warning}
{{- end }}
