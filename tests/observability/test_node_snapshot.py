"""What the node's document says where something is not known."""

from __future__ import annotations

from gpushare_agent.observability.attribution import Holders, join_usage
from gpushare_agent.observability.node_snapshot import node_document
from tests.support_usage import allocation, card_sample, driver_sample, facts, key_of, snapshot


def test_a_container_has_no_use_on_a_card_that_lists_no_processes() -> None:
    """Null, as in the metrics: a zero would be a measured zero. On a card that lists none of its, it is zero."""
    held = allocation(key_of(1), (0, 1), cores=200, blocks=0)
    cards = driver_sample(card_sample(0, lists=False), card_sample(1))
    usage = join_usage(cards, {}, Holders(cards={held.key: held.cards}, by_id={}), sampled_at=1.0)
    [container] = node_document(snapshot(facts(held), usage=usage))["containers"]
    silent, listing = (card["usage"] for card in container["cards"])
    assert silent is None
    assert (listing["sm_ratio"], listing["memory_bytes"], listing["pids"]) == (0.0, 0, [])
    [before] = node_document(snapshot(facts(held)))["containers"]
    assert [card["usage"] for card in before["cards"]] == [None, None]
