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
        description="Address to listen on. The default serves a scheduler on the same host; empty listens on every address.",
    )
    port: Count = Field(default=3456, ge=0, le=65535, description="Port to listen on; 0 takes any free one.")
    reserve: Literal["bind", "filter"] = Field(
        default="bind",
        description="When GPUs are set aside. bind: the scheduler delegates the bind, and filter changes nothing. filter:"
        " as gpu-admission does, for schedulers that bind themselves; the answer is then exactly one node.",
    )
    node_policy: Literal["binpack", "spread"] = Field(
        default="binpack",
        description="Pods go to the fullest node that fits (binpack: whole nodes stay free) or to the emptiest (spread).",
    )
    config: OptionalPath = Field(
        default=None,
        description="gpu-admission's configuration file (JSON). Its values replace quota_name, quota_namespace,"
        " model_label and pool_label. Empty: none.",
    )
    quota_name: _Name = Field(
        default="gpuquota",
        description="ConfigMap with the quota of each namespace (docs/reference/quota.md). None: no quota.",
    )
    quota_namespace: _Name = Field(default="kube-system", description="Namespace of that ConfigMap.")
    model_label: _Label = Field(
        default=GPU_MODEL_LABEL, description="Node label with the GPUs' model, by which quota counts."
    )
    pool_label: _Label = Field(
        default="gaia.tencent.com/gpu-pool", description="Node label with the pool to which a node belongs."
    )
    tls_cert: OptionalPath = Field(
        default=None, description="Certificate chain to serve HTTPS with, PEM; read again when it changes. Empty: HTTP."
    )
    tls_key: OptionalPath = Field(default=None, description="The certificate's private key, PEM.")
    client_ca: OptionalPath = Field(
        default=None,
        description="Certificate authorities, PEM. Only clients with a certificate of theirs may call the scheduler's verbs;"
        " health and metrics stay open. Empty: whoever reaches the address may call them.",
    )
    claims_webhook: Literal["off", "open", "certificate"] = Field(
        default="off",
        description="Answer POST /mutate-pods, the webhook that turns pods' limits into ResourceClaims"
        " (docs/how-to/turn-limits-into-claims.md). open: for every client, as an API server shows no certificate unless"
        " configured to. certificate: only for those of client_ca, as the scheduler's verbs. Both need TLS.",
    )
    max_body_mib: Count = Field(
        default=8,
        ge=1,
        le=512,
        description="Longest request, MiB. Names of 5,000 nodes are 0.2 MiB; whole node objects 10 to 20 KiB each. It is"
        " decoded in steps, between which others are answered.",
    )
    bind_timeout_s: Seconds = Field(
        default=4.0,
        ge=0.1,
        le=60,
        description="How long a bind may take, seconds. Less than the scheduler's httpTimeout, which is 5 s unless set.",
    )
    assume_timeout_s: Seconds = Field(
        default=60.0,
        ge=1,
        le=3600,
        description="With reserve filter: how long a reservation waits for its pod to be bound, seconds.",
    )
    leader_elect: bool = Field(
        default=True,
        description="Only the replica that holds the lease answers. false: this one always does, so there must be no other.",
    )
    lease_name: _Name = Field(default="gpushare-agent-extender", description="Name of the Lease.")
    lease_namespace: _NameOrEmpty = Field(
        default="", description="Its namespace. Empty: the pod's own (variable POD_NAMESPACE), else kube-system."
    )
    lease_duration_s: Seconds = Field(
        default=15.0, ge=1, le=600, description="How long others wait for a leader that does not renew, seconds."
    )
    renew_deadline_s: Seconds = Field(
        default=10.0,
        ge=0.5,
        le=600,
        description="How long a leader continues without having renewed its lease, seconds. The rest of lease_duration_s is"
        " for its last requests to end.",
    )
    retry_period_s: Seconds = Field(
        default=2.0, ge=0.05, le=60, description="How often the lease is read or renewed, seconds."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not self.retry_period_s < self.renew_deadline_s < self.lease_duration_s:
            raise ValueError("retry_period_s must be less than renew_deadline_s, and that less than lease_duration_s")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key are only of use together")
        if self.client_ca is not None and self.tls_cert is None:
            raise ValueError("client_ca needs tls_cert and tls_key: without TLS no client shows a certificate")
        if self.claims_webhook != "off" and self.tls_cert is None:
            raise ValueError("claims_webhook needs tls_cert and tls_key: an API server calls webhooks by HTTPS alone")
        if self.claims_webhook == "certificate" and self.client_ca is None:
            raise ValueError("claims_webhook certificate needs client_ca: whose certificates are meant?")
        return self
