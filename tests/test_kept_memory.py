"""Large tensors of a search use the memory of earlier ones, which the system may take back."""

import errno
import mmap
import sys
import threading

import pytest
import torch
from vaswani.generation import memory_vaswani
from vaswani.generation.memory_vaswani import empty

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
    monkeypatch.setattr(memory_vaswani, "_MOST", 2**22)
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
