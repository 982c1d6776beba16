"""Large tensors of a search use the memory of earlier ones, which the system may take back."""

import errno
import mmap
import sys
import threading

import pytest
import torch
from vaswani.generation import memory_vaswani
from vaswani.generation.memory_vaswani import empty, empty_for_weights

LARGE = 2**19  # floats, 2 MB


@pytest.fixture(autouse=True)
def _own_blocks(monkeypatch):
    monkeypatch.setattr(memory_vaswani, "_unused", type(memory_vaswani._unused)(list))


def kept():
    return sum(size * len(blocks) for size, blocks in memory_vaswani._unused.items())


def test_the_memory_of_a_freed_tensor_is_used_again():
    tensor = empty((LARGE,)).fill_(1.0)
    address = tensor.data_ptr()
    part = tensor[10:]
    del tensor
    assert kept() == 0, "a view still uses the memory"
    assert (part == 1).all()
    del part
    assert kept() == 2**21
    again = empty((2, LARGE // 2 - 5))
    assert (again.data_ptr(), again.shape, again.dtype) == (
        address,
        (2, LARGE // 2 - 5),
        torch.float32,
    )
    assert again.fill_(3.0).sum() == 3 * again.numel()


def test_tensors_of_the_same_time_share_nothing():
    tensors = [empty((LARGE,), torch.int32).fill_(number) for number in range(4)]
    assert [int(tensor.unique()) for tensor in tensors] == [0, 1, 2, 3]


def test_threads_share_nothing():
    wrong = []

    def work(number):
        for _ in range(50):
            tensor = empty((LARGE,)).fill_(number)
            if not bool((tensor == number).all()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_small_tensors_are_left_to_torch():
    tensor = empty((3, 5), torch.float64)
    assert tensor.dtype == torch.float64
    del tensor
    assert kept() == 0


def test_the_kept_memory_has_a_limit(monkeypatch):
    monkeypatch.setattr(memory_vaswani, "_MOST_KEPT", 2**22)
    tensors = [empty((LARGE,)) for _ in range(3)]
    tensors.clear()
    assert kept() == 2**22


def test_a_block_that_the_system_refuses_is_left_to_torch(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(memory_vaswani.mmap, "mmap", refuse)
    assert empty((LARGE,)).shape == (LARGE,)
    assert kept() == 0


def test_where_the_system_cannot_take_memory_back_none_is_kept(monkeypatch):
    monkeypatch.delattr(memory_vaswani.mmap, "MADV_FREE")
    empty((LARGE,))
    assert kept() == 0


def test_a_block_that_the_system_cannot_take_back_is_not_kept(monkeypatch):
    class WithoutAdvice(mmap.mmap):
        def madvise(self, *args):
            raise OSError(errno.EINVAL, "Invalid argument")

    unraised = []
    monkeypatch.setattr(memory_vaswani.mmap, "mmap", WithoutAdvice)
    monkeypatch.setattr(sys, "unraisablehook", unraised.append)
    empty((LARGE,))
    assert kept() == 0
    assert not unraised


class TestMemoryForWeights:
    """Small weights share blocks in huge pages, which are returned when no weight is left."""

    pytestmark = pytest.mark.skipif(
        not hasattr(memory_vaswani.mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages"
    )

    @pytest.fixture(autouse=True)
    def blocks(self, monkeypatch):
        blocks = memory_vaswani._Blocks()
        monkeypatch.setattr(memory_vaswani, "_blocks", blocks)
        return blocks

    def test_weights_do_not_overlap(self):
        weights = [empty_for_weights((size, 3)).fill_(size) for size in (1, 5, 300, 7, 2**18)]
        assert [weight.unique().tolist() for weight in weights] == [[1], [5], [300], [7], [2**18]]
        assert all(weight.data_ptr() % 64 == 0 for weight in weights)

    def test_memory_that_no_weight_uses_is_given_to_the_next(self):
        kept, dropped = empty_for_weights((100,)), empty_for_weights((100,))
        place = dropped.data_ptr()
        rows = dropped[3:]
        del dropped
        assert empty_for_weights((100,)).data_ptr() not in (place, kept.data_ptr())
        del rows
        assert empty_for_weights((100,)).data_ptr() == place

    def test_a_block_is_returned_when_no_weight_is_left(self, blocks):
        weights = [empty_for_weights((100,)) for _ in range(3)]
        assert blocks.last() is not None
        weights.pop()
        assert blocks.last() is not None
        weights.clear()
        assert blocks.last() is None
        assert empty_for_weights((100,)).fill_(1).sum() == 100

    def test_a_full_block_is_followed_by_another(self, blocks, monkeypatch):
        monkeypatch.setattr(memory_vaswani, "_BLOCK", 2**16)
        weights = [empty_for_weights((2**12,)).fill_(number) for number in range(9)]
        assert [int(weight[-1]) for weight in weights] == list(range(9))
        del weights[:4]
        assert sum(map(len, blocks.unused.values())) == 4
        weights += [empty_for_weights((2**13 - 1,)) for _ in range(3)]
        assert sum(map(len, blocks.unused.values())) == 0, "their block is gone"

    def test_a_large_weight_has_a_block_of_its_own(self, blocks):
        weight = empty_for_weights((2**24,))
        assert weight.shape == (2**24,)
        assert blocks.last() is None

    def test_systems_without_huge_pages_serve_weights_too(self, monkeypatch):
        monkeypatch.setattr(memory_vaswani.mmap, "MADV_HUGEPAGE", -1)
        assert empty_for_weights((100,)).fill_(2).sum() == 200
        monkeypatch.delattr(memory_vaswani.mmap, "MADV_HUGEPAGE")
        assert empty_for_weights((100,)).fill_(2).sum() == 200

    def test_torch_serves_weights_when_no_block_can_be_had(self, monkeypatch):
        def refuse(*_, **__):
            raise OSError("no memory")

        monkeypatch.setattr(memory_vaswani.mmap, "mmap", refuse)
        assert empty_for_weights((100,)).fill_(2).sum() == 200
