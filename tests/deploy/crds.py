"""The fields of custom resources that the chart writes, as in their definitions.

Written by hand, and only these fields: a field that the chart does not write is refused here, though its definition may
have it, and rules across fields (CEL) are not among them. `python -m tests.deploy.definitions FOLDER` compares them
with definitions. Kubernetes' own objects are checked with its schemas."""

from __future__ import annotations

from typing import Any

TEXT = {"type": "string", "minLength": 1}
COUNT = {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}


def an(required: str = "", **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties, "required": required.split()}


def some(items: Any) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": items}


def resource(version: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = an("name labels", name=TEXT, labels=TEXTS, annotations=TEXTS)
    return an("apiVersion kind metadata spec", apiVersion={"const": version}, kind=TEXT, metadata=metadata, spec=spec)


_RULE = an(
    "alert expr labels annotations",
    **{"alert": TEXT, "expr": TEXT, "for": {"pattern": "^[0-9]+[smhd]$"}, "labels": TEXTS, "annotations": TEXTS},
)
_ENDPOINT = an(
    "port",
    port=TEXT,
    path=TEXT,
    relabelings=some(an("targetLabel", targetLabel=TEXT, replacement=TEXT)),
)
_BEHAVIOR = an(
    policies=some(an("type value periodSeconds", type={"enum": ["Pods", "Percent"]}, value=COUNT, periodSeconds=COUNT)),
    stabilizationWindowSeconds=COUNT,
)
# Pod templates are checked with Kubernetes' own schema.
_RESOURCES = an(requests=TEXTS, limits=TEXTS)
_ENV = some(an("name", name=TEXT, value={"type": "string"}, valueFrom={"type": "object"}))
_RAY_GROUP = {"rayStartParams": TEXTS, "template": {"type": "object"}, "resources": TEXTS}
_RAY = an(
    "headGroupSpec workerGroupSpecs rayVersion",
    rayVersion={"pattern": r"^\d+\.\d+\.\d+$"},
    enableInTreeAutoscaling={"type": "boolean"},
    autoscalerOptions=an(
        version={"enum": ["v1", "v2"]},
        idleTimeoutSeconds=COUNT,
        resources=_RESOURCES,
        args=some(TEXT),
        env=_ENV,
        securityContext={"type": "object"},
        volumeMounts=some(an("name mountPath", name=TEXT, mountPath=TEXT)),
    ),
    gcsFaultToleranceOptions=an(
        "redisAddress",
        redisAddress=TEXT,
        redisPassword=an("valueFrom", valueFrom=an("secretKeyRef", secretKeyRef=an("name key", name=TEXT, key=TEXT))),
        externalStorageNamespace=TEXT,
    ),
    headGroupSpec=an("template", **_RAY_GROUP),
    workerGroupSpecs=some(
        an(
            "groupName template minReplicas maxReplicas",
            groupName=TEXT,
            replicas=COUNT,
            minReplicas=COUNT,
            maxReplicas=COUNT,
            **_RAY_GROUP,
        )
    ),
)
_ROUTE = an(
    "parentRefs rules",
    parentRefs=some(an("name", name=TEXT, namespace=TEXT)),
    hostnames=some(TEXT),
    rules=some(an("backendRefs", backendRefs=some(an("name port", name=TEXT, port=COUNT)))),
)
_PROMETHEUS = an(
    "type metadata",
    type={"const": "prometheus"},
    metricType={"const": "AverageValue"},
    metadata=an(
        "serverAddress query threshold ignoreNullValues",
        serverAddress=TEXT,
        query=TEXT,
        threshold=TEXT,
        ignoreNullValues={"enum": ["true", "false"]},
    ),
)
_TIMETABLE = an(
    "type metadata",
    type={"const": "cron"},
    metadata=an("timezone start end desiredReplicas", timezone=TEXT, start=TEXT, end=TEXT, desiredReplicas=TEXT),
)
SCHEMAS = {
    "PrometheusRule": resource(
        "monitoring.coreos.com/v1", an("groups", groups=some(an("name rules", name=TEXT, rules=some(_RULE))))
    ),
    "PodMonitor": resource(
        "monitoring.coreos.com/v1",
        an(
            "selector podMetricsEndpoints",
            selector=an(
                matchLabels=TEXTS,
                matchExpressions=some(
                    an("key operator values", key=TEXT, operator={"enum": ["In"]}, values=some(TEXT))
                ),
            ),
            podMetricsEndpoints=some(_ENDPOINT),
        ),
    ),
    "ScaledObject": resource(
        "keda.sh/v1alpha1",
        an(
            "scaleTargetRef triggers",
            scaleTargetRef=an("name", name=TEXT),
            minReplicaCount=COUNT,
            maxReplicaCount=COUNT,
            fallback=an(
                "failureThreshold replicas",
                failureThreshold=COUNT,
                replicas=COUNT,
                behavior={"enum": ["static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"]},
            ),
            advanced=an(horizontalPodAutoscalerConfig=an(behavior=an(scaleUp=_BEHAVIOR, scaleDown=_BEHAVIOR))),
            triggers=some({"anyOf": [_PROMETHEUS, _TIMETABLE]}),
        ),
    ),
    "RayCluster": resource("ray.io/v1", _RAY),
    "GRPCRoute": resource("gateway.networking.k8s.io/v1", _ROUTE),
    "HTTPRoute": resource("gateway.networking.k8s.io/v1", _ROUTE),
}
