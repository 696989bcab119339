"""The account of one GPU: nothing is free twice, nothing is negative, and what init containers hand on is used first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpushare_agent.core.model.allocations import Charge
from gpushare_agent.core.model.resources import Request
from gpushare_agent.core.placement import GpuAccount
from tests.gpus.support_gpus import gpu, uuid_of


@st.composite
def accounts(draw: st.DrawFn) -> GpuAccount:
    """Anything that a ledger may hold, also more than the GPU has: pods of unknown GPUs are charged on every one."""
    counts = st.integers(0, 150)
    is_whole = draw(st.booleans())
    return GpuAccount(
        index=0,
        uuid=uuid_of(0),
        memory_mib=draw(st.sampled_from([0, 1000, 16 * 1024, 24 * 1024])),
        block_mib=draw(st.sampled_from([256, 300, 1024])),
        unit_mib=draw(st.sampled_from([1, 1000, 1024])),
        is_healthy=draw(st.booleans()),
        used=Charge(draw(counts), draw(counts), draw(counts), int(is_whole), draw(st.integers(0, 3))),
        reusable=Charge(draw(counts), draw(counts), draw(counts), int(is_whole and draw(st.booleans()))),
        max_shares=draw(st.sampled_from([None, 2])),
        offered_cores=draw(st.integers(0, 100)),
    )


@given(account=accounts())
def test_free_capacity_is_never_negative_nor_more_than_the_gpu_has(account: GpuAccount) -> None:
    """Whatever is allocated."""
    assert 0 <= account.free_cores <= min(100, account.offered_cores)
    assert 0 <= account.free_blocks <= account.total_blocks
    assert 0 <= account.free_units <= account.total_units
    if account.is_free:
        assert (account.free_cores, account.free_blocks) == (100, account.total_blocks)


@given(
    asked=st.lists(
        st.tuples(
            st.sampled_from([(10, 8, 0), (40, 30, 0), (5, 60, 0), (100, 0, 0), (0, 0, 3), (0, 0, 20)]), st.booleans()
        ),
        max_size=8,
    )
)
def test_what_fits_the_account_is_never_more_than_the_gpu(asked: list[tuple[tuple[int, int, int], bool]]) -> None:
    """Containers one after the other, init containers among them, each only where it fits by the account: what they have
    then is never more cores than a GPU has, nor more memory."""
    account = gpu(0)
    for (cores, blocks, units), is_init in asked:
        fits = account.is_free if cores >= 100 else account.free_cores >= cores and account.free_blocks >= blocks
        if not fits or account.free_units < units:
            continue
        before = account
        account = account.allocate(Request(cores=cores, blocks=blocks, units=units), is_reusable=is_init)
        assert account.used.cores <= 100
        assert account.used.cores - before.used.cores == max(0, cores - before.reusable.cores)
        assert before.is_whole <= account.is_whole
        used_mib = account.used.blocks * account.block_mib + account.used.units * account.unit_mib
        assert used_mib <= account.memory_mib


def test_an_init_containers_part_is_used_before_more_is_allocated() -> None:
    """The container after it gets 30 of its cores, and 20 more; what it does not use stays for the next."""
    account = gpu(0).allocate(Request(cores=30, blocks=40), is_reusable=True)
    assert (account.free_cores, account.free_blocks) == (100, 96)
    account = account.allocate(Request(cores=50, blocks=10))
    assert (account.used.cores, account.used.blocks) == (50, 40)
    assert (account.free_cores, account.free_blocks) == (50, 86)


def test_a_whole_gpu_has_no_memory_left_for_others() -> None:
    """Handed on by an init container it can be had again for cores, and not for gpu-mem units."""
    whole = gpu(0).allocate(Request(cores=100))
    assert (whole.free_cores, whole.free_blocks, whole.free_units, whole.is_free) == (0, 0, 0, False)
    handed_on = gpu(0).allocate(Request(cores=100), is_reusable=True)
    assert (handed_on.free_cores, handed_on.free_blocks, handed_on.free_units) == (100, 96, 0)
    assert handed_on.is_free and not handed_on.allocate(Request(cores=100)).is_free


def test_blocks_and_units_take_from_one_memory() -> None:
    """A unit takes four blocks of 256 MiB."""
    account = gpu(0).allocate(Request(cores=10, blocks=10, units=3))
    assert (account.free_blocks, account.free_units) == (96 - 10 - 12, (96 - 10) // 4 - 3)


def test_a_gpu_with_as_many_shares_as_it_can_serve_has_no_cores_and_no_units_free() -> None:
    """The memory is there, and nobody can have it."""
    full = replace(gpu(0), used=Charge(shares=2), max_shares=2)
    assert full.is_full
    assert (full.free_cores, full.free_units, full.free_blocks) == (0, 0, 96)
