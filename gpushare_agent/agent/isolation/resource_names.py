"""The resources that this node offers: the isolation in use decides whether MIG instances are shared. No state."""

from __future__ import annotations

from collections.abc import Collection

from gpushare_agent.agent.isolation import ISOLATIONS
from gpushare_agent.core.model.isolation import AUTO
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.core.settings import resource_names as of_settings
from gpushare_agent.core.settings.settings import Settings


def resource_names(settings: Settings, mig_profiles: Collection[str] = ()) -> ResourceNames:
    """The resources that the node offers, with MIG instances of these profiles."""
    # Until `auto` has chosen, instances are offered whole: no share may be given that the chosen one cannot keep.
    is_shared = settings.isolation != AUTO and not ISOLATIONS[settings.isolation].why_not_in_mig
    return of_settings.resource_names(settings, mig_profiles, shares_in_mig=is_shared)
