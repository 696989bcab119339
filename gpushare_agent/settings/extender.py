"""Settings of the scheduler extender (command extender): its address, when it reserves, quota, TLS, leader election.

A section of settings/tree.py. The resources' names and share_policy are those of the agents: resources.*,
gpushare.* and placement.share_policy. The defaults of address, quota and labels are gpu-admission's.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from gpushare_agent.model.names import GPU_MODEL_LABEL
from gpushare_agent.settings.values import DNS_NAME, Count, OptionalPath, Seconds, Section, matches

_NO_NAME = "is no name of a Kubernetes object (small letters, digits, - and .)"
_Name = Annotated[str, matches(DNS_NAME, _NO_NAME)]
_NameOrEmpty = Annotated[str, matches(re.compile(f"({DNS_NAME.pattern})?"), _NO_NAME)]
_LABEL = re.compile(rf"({DNS_NAME.pattern}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?")
_Label = Annotated[str, matches(_LABEL, "is no label such as gaia.tencent.com/gpu-model")]


class ExtenderSettings(Section):
    """The scheduler extender: where it listens, how it decides, who leads."""

    addr: str = Field(
        default="127.0.0.1",
        max_length=253,
        description="Address to listen on. Empty: every address.",
    )
    port: Count = Field(default=3456, ge=0, le=65535, description="Port to listen on; 0 takes any free one.")
    reserve: Literal["bind", "filter"] = Field(
        default="bind",
        description="When GPUs are reserved. bind: at the bind. filter: at the filter, for schedulers that bind themselves.",
    )
    node_policy: Literal["fgd", "binpack", "spread"] = Field(
        default="binpack",
        description="Pods go to the node where the fewest free GPUs become useless to the pods that usually come (fgd), to "
        "the fullest that fits (binpack), or to the emptiest (spread).",
    )
    most_fitting_nodes: Count = Field(
        default=100,
        ge=0,
        le=20_000,
        description="The most nodes that filter answers, the best of those that fit; a pod with preferred affinities or "
        "spread constraints of its own gets all. 0: always all, with reasons for the others.",
    )
    config: OptionalPath = Field(
        default=None,
        description="gpu-admission's configuration file (JSON). It replaces quota_name, quota_namespace, model_label and "
        "pool_label. Empty: /etc/kubernetes/gpu-admission.config, else gpu-quota-admission.config there.",
    )
    quota_name: _Name = Field(
        default="gpuquota",
        description="ConfigMap with the namespaces' quota (docs/reference/quota.md).",
    )
    quota_namespace: _Name = Field(default="kube-system", description="Namespace of that ConfigMap.")
    model_label: _Label = Field(
        default=GPU_MODEL_LABEL, description="Node label with the GPUs' model, by which quota counts."
    )
    pool_label: _Label = Field(default="gaia.tencent.com/gpu-pool", description="Node label with the node's pool.")
    tls_cert: OptionalPath = Field(
        default=None, description="Certificate chain for HTTPS, PEM; read again when it changes. Empty: HTTP."
    )
    tls_key: OptionalPath = Field(default=None, description="Private key of the certificate, PEM.")
    client_ca: OptionalPath = Field(
        default=None,
        description="Certificate authorities, PEM, of clients that may call the scheduler's verbs. Empty: every client may.",
    )
    claims_webhook: Literal["off", "open", "certificate"] = Field(
        default="off",
        description="Answer POST /mutate-pods and /translate-pods (docs/how-to/turn-limits-into-claims.md). open: every "
        "client. certificate: clients of client_ca. Both need TLS.",
    )
    max_body_mib: Count = Field(
        default=8,
        ge=1,
        le=512,
        description="Longest request, MiB. A whole node object has 10 to 20 KiB.",
    )
    bind_timeout_s: Seconds = Field(
        default=4.0,
        ge=0.1,
        le=60,
        description="Time limit of a bind. Must be less than the scheduler's httpTimeout.",
    )
    assume_timeout_s: Seconds = Field(
        default=60.0,
        ge=1,
        le=3600,
        description="How long a reservation waits for the bind (reserve filter).",
    )
    leader_elect: bool = Field(
        default=True,
        description="Elect a leader by the Lease. false: there must be only one replica.",
    )
    lease_name: _Name = Field(default="gpushare-agent-extender", description="Name of the Lease.")
    lease_namespace: _NameOrEmpty = Field(
        default="", description="Namespace of the Lease. Empty: the variable POD_NAMESPACE, else kube-system."
    )
    # The three times are kube-scheduler's own.
    lease_duration_s: Seconds = Field(
        default=15.0, ge=1, le=600, description="How long others wait for a leader that does not renew."
    )
    renew_deadline_s: Seconds = Field(
        default=10.0,
        ge=0.5,
        le=600,
        description="How long a leader continues without a renewal.",
    )
    retry_period_s: Seconds = Field(default=2.0, ge=0.05, le=60, description="Period of reading or renewing the Lease.")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        # A leader must stop before another one may begin, and try at least once more before it stops.
        if not self.retry_period_s < self.renew_deadline_s < self.lease_duration_s:
            raise ValueError("retry_period_s must be less than renew_deadline_s, and that less than lease_duration_s")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key are only of use together")
        if self.client_ca is not None and self.tls_cert is None:
            raise ValueError("client_ca needs tls_cert and tls_key: without TLS no client shows a certificate")
        if self.claims_webhook != "off" and self.tls_cert is None:
            raise ValueError("claims_webhook needs tls_cert and tls_key: an API server calls webhooks by HTTPS alone")
        # Without authorities every certificate would be as good as any.
        if self.claims_webhook == "certificate" and self.client_ca is None:
            raise ValueError("claims_webhook certificate needs client_ca: whose certificates are meant?")
        return self
