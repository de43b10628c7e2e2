{{- define "tandem.ray.env" -}}
- {name: RAY_AUTH_MODE, value: token}
- {name: RAY_AUTH_TOKEN, valueFrom: {secretKeyRef: {name: {{ include "tandem.secret" . }}, key: ray_token}}}
- {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
- {name: HOME, value: /cache}
# A Ray node ends after its worker and must not use up the rest of the pod's grace period.
- {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: "5"}
{{- end }}

{{- /* A sidecar of the worker, not its parent: when Ray ends, no stream ends. */}}
{{- define "tandem.ray.node" -}}
- name: ray
  restartPolicy: Always
  image: {{ include "tandem.image" (dict "root" .root "image" "worker") }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [ray, start, "--address={{ include "tandem.name" .root }}-ray:6379", --block, --node-ip-address=$(POD_IP), --num-cpus=0, --num-gpus=0]
  args: [--disable-usage-stats, --object-store-memory=80000000, {{ printf "--resources={\"%s\": 1}" .component | quote }}]
  env:
    {{- include "tandem.ray.env" .root | nindent 4 }}
  resources: {{- toYaml .root.Values.ray.resources | nindent 4 }}
  securityContext: {{- include "tandem.hardened" .root | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: cache, mountPath: /cache}
    - {name: shm, mountPath: /dev/shm}
{{- end }}
