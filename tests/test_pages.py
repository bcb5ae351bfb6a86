"""Pages of a KV cache, one by one: sharing, tags, giving back, and what the errors say."""

import copy

import pytest

from phasefold.errors import PageError
from phasefold.serving.paged.pages import NULL, Lease, PagePool


def filled(tracked: bool = True) -> tuple[PagePool, Lease]:
    pool = PagePool(6, 2, tracked=tracked)
    lease = pool.open([1, 2, 3, 4, 5])
    pool.grow(lease, 5)
    pool.commit(lease, [1, 2, 3, 4, 5])
    return pool, lease


def test_the_error_names_page_and_tags() -> None:
    pool, lease = filled()
    assert lease.pages == [1, 2, 3] and lease.table.tolist() == [1, 2, 3, NULL, NULL, NULL]
    lease.table[1] = 4
    error = pool.check([lease])[0]
    assert str(error) == (
        "entry 1 of the page table leads to page 4: "
        "expected tag 8 (page 2, generation 1), found tag 4 (page 4, generation 0)"
    )
    assert (pool.counters.checks, pool.counters.mismatches) == (3, 1)


def test_one_wrong_table_stops_one_request() -> None:
    pool, lease = filled()
    other = pool.open([9, 9])
    pool.grow(other, 2)
    third = pool.open([7])
    pool.grow(third, 1)
    other.table[0] = NULL
    assert set(pool.check([lease, other, third])) == {1}


def test_tags_change_at_each_reallocation_and_never_come_back() -> None:
    pool, seen = PagePool(4, 2), set()
    for _ in range(50):
        lease = pool.open([0])
        pool.grow(lease, 6)
        tags = lease.tags[:3].tolist()
        assert not seen & set(tags) and len(set(tags)) == 3
        assert [tag % 4 for tag in tags] == lease.pages
        seen |= set(tags)
        assert pool.release(lease) is None


def test_full_pages_of_equal_prefixes_are_shared_while_they_are_there() -> None:
    pool, lease = filled()
    twin = pool.open([1, 2, 3, 4, 5, 6, 7])
    assert twin.pages == [1, 2] and twin.shared == twin.length == 4 and pool.counters.reused == 2
    assert pool.open([1, 2, 3, 4]).pages == [1]  # the last token is left to compute
    assert pool.open([1, 2, 9, 9, 5]).pages == [1] and pool.open([3, 4, 5]).pages == []
    assert pool.release(lease) is None
    assert 1 not in pool.free and 3 in pool.free
    again = pool.open([1, 2, 3, 4, 8])
    assert again.pages == [1, 2] and pool.references[1] == 4


def test_a_page_given_out_anew_is_not_found_by_its_old_prefix() -> None:
    pool, lease = filled()
    assert pool.release(lease) is None
    other = pool.open([8])
    pool.grow(other, 10)
    assert sorted(other.pages) == [1, 2, 3, 4, 5]
    assert pool.open([1, 2, 3, 4, 5]).pages == []


def test_giving_back_twice_is_told() -> None:
    pool, lease = filled()
    copy_of_it, late = copy.deepcopy(lease), copy.deepcopy(lease)
    assert pool.release(lease) is None
    assert "given back twice" in str(pool.release(copy_of_it))
    other = pool.open([0])
    pool.grow(other, 10)
    error = pool.release(late)
    assert "given back too late: entry 0 of the page table leads to page 1: expected tag 7" in str(error)
    assert pool.check([other]) == {} and sum(pool.references) == 5


def test_too_few_pages_leave_everything_as_it_was() -> None:
    pool, lease = filled()
    with pytest.raises(PageError, match=r"3 pages wanted, 2 of 5 are free"):
        pool.grow(lease, 12)
    assert lease.pages == [1, 2, 3] and list(pool.free) == [4, 5]


def test_without_a_tracker_nothing_is_compared() -> None:
    pool, lease = filled(tracked=False)
    lease.table[0] = 5
    assert pool.check([lease]) == {} and pool.counters.checks == 0 and pool.counters.mismatches == 0
    assert pool.check([]) == {}
