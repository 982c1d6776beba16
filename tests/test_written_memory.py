"""Unwritten memory is not compared again, and every write to memory is seen."""

import ctypes
import mmap
import multiprocessing
import os
import re
import resource
import threading

import pytest
import torch
from compiled_models import KINDS, compiled, model_with, translate
from forks import in_child
from vaswani.generation.fingerprints_vaswani import Fingerprints, fingerprint, in_parts
from vaswani.generation.snapshots_vaswani import _prepared_of

from vaswani import VaswaniForConditionalGeneration, VaswaniInt8Config

pytestmark = compiled
ROWS, WIDTH = 512, 512  # of a tensor here: 1 MiB
HUGE = 2**21  # bytes of a huge page
FIXED = 0x10  # of mmap on Linux


def fingerprints_of(*tensors):
    parts = list(in_parts(tensors))
    found = Fingerprints(parts, list(map(fingerprint, parts)))
    for _ in range(3):  # the second comparison starts to watch
        assert found.hold()
    return found


def is_compared(found):
    """Corrupt the middle digest of each fingerprint, and tell whether `hold` notices."""
    for digests in found.digests:
        digests[len(digests) // 2] ^= 1
    holds = found.hold()
    for digests in found.digests:
        digests[len(digests) // 2] ^= 1
    return not holds


@pytest.fixture
def values():
    return torch.randn(ROWS, WIDTH)


def can_watch():
    """Tell whether Linux is new enough and allows userfaultfd."""
    release = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))
    descriptor = ctypes.CDLL(None).syscall(323, 1)
    if descriptor >= 0:
        os.close(descriptor)
    return descriptor >= 0 and release >= (6, 7)


@pytest.fixture
def watched(values):
    if not can_watch():
        pytest.skip("this system does not report which memory was written")
    return fingerprints_of(values)


def read_into(values):
    """Let the system write to the memory, as it does when a file is read."""
    inward, outward = os.pipe()
    os.write(outward, bytes(range(1, 65)))
    os.readv(inward, [memoryview(values.numpy().reshape(-1)).cast("B")[2**19 : 2**19 + 64]])
    os.close(inward)
    os.close(outward)


def write_in_thread(values):
    thread = threading.Thread(target=lambda: values.neg_())
    thread.start()
    thread.join()


WRITES = {
    "torch": lambda values: values.add_(1),
    "one value": lambda values: values[ROWS // 2, 9].neg_(),
    "the first value": lambda values: values[0, 0].neg_(),
    "the last value": lambda values: values[-1, -1].neg_(),
    "an alias": lambda values: values.detach().view(-1, 2)[:, 1].zero_(),
    "numpy": lambda values: values.numpy().fill(2),
    "an address": lambda values: ctypes.memset(values.data_ptr() + 2**19, 7, 4),
    "the system": read_into,
    "another thread": write_in_thread,
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_is_seen(write, threads, values, with_threads):
    found, before = with_threads(threads, lambda: fingerprints_of(values)), values.clone()
    write(values)
    assert not found.hold()
    assert not found.hold()
    values.copy_(before)
    assert found.hold()
    write(values)
    assert not found.hold()


def test_unwritten_memory_is_not_compared(watched):
    for _ in range(3):
        assert not is_compared(watched)


def test_memory_is_compared_once_after_a_write_that_changes_nothing(watched, values):
    values.copy_(values.clone())
    assert is_compared(watched)
    assert watched.hold()
    assert not is_compared(watched)


def test_only_parts_that_were_written_are_compared(watched, values):
    values[0, 0] = values[0, 0].clone()
    assert not is_compared(watched)


def test_many_separate_writes_are_seen():
    """Linux lists the written pages of a scan in portions."""
    values = torch.randn(4 * ROWS, WIDTH)
    found = fingerprints_of(values)
    values[::4] = values[::4].clone()  # a write to every other page
    values[-1, -1].neg_()
    assert not found.hold()
    values[-1, -1].neg_()
    assert found.hold()


def test_a_write_is_seen_by_all_that_watch_the_memory(values):
    first, second = fingerprints_of(values), fingerprints_of(values[ROWS // 2 :])
    values[-1, -1].neg_()
    assert not first.hold()
    third = fingerprints_of(values)
    assert not second.hold()
    assert not first.hold()
    assert third.hold()


def test_a_write_beside_another_tensor_is_seen():
    """The tensors share a page."""
    both = torch.randn(ROWS, WIDTH)
    left, right = map(fingerprints_of, both.split(ROWS // 2 + 1))
    both[ROWS // 2, -1].neg_()
    assert right.hold()
    assert not left.hold()
    both[ROWS // 2 + 1, 0].neg_()
    assert not left.hold()
    assert not right.hold()


def write_first(values):
    values[0, 0] = 5


def test_a_write_of_another_process_to_shared_memory_is_seen(values):
    found = fingerprints_of(values.share_memory_())
    process = multiprocessing.get_context("spawn").Process(target=write_first, args=(values,))
    process.start()
    process.join()
    assert values[0, 0] == 5
    assert not found.hold()


@pytest.mark.parametrize("shared", [False, True], ids=["a private mapping", "a shared mapping"])
def test_a_mapped_file_is_compared(shared, tmp_path):
    """Linux does not report what another program writes to the file."""
    file = tmp_path / "weights"
    file.write_bytes(bytes(4 * ROWS * WIDTH))
    values = torch.from_file(str(file), shared=shared, size=ROWS * WIDTH).view(ROWS, WIDTH)
    found = fingerprints_of(values)
    assert is_compared(found)
    with file.open("r+b") as opened:
        opened.seek(2 * ROWS * WIDTH)
        opened.write(b"\1")
    assert values[ROWS // 2, 0] != 0
    assert not found.hold()


@pytest.fixture
def system():
    """Return the C library, for calls that torch does not make."""
    system = ctypes.CDLL(None, use_errno=True)
    system.mmap.restype = ctypes.c_void_p
    system.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    system.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return system


def mapped(system, size, place=None):
    """Map private memory, at an address if one is given."""
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0 if place is None else FIXED)
    return system.mmap(place, size, mmap.PROT_READ | mmap.PROT_WRITE, kind, -1, 0)


def tensor_at(place):
    memory = (ctypes.c_float * (ROWS * WIDTH)).from_address(place)
    return torch.frombuffer(memory, dtype=torch.float32).view(ROWS, WIDTH)


def test_memory_that_is_mapped_again_is_compared(system):
    place = mapped(system, 4 * ROWS * WIDTH)
    values = tensor_at(place).fill_(3)
    found = fingerprints_of(values)
    assert mapped(system, 4 * ROWS * WIDTH, place) == place
    assert values[0, 0] == 0
    assert not found.hold()
    values.fill_(3)
    assert found.hold()


@pytest.mark.parametrize("pages", ["MADV_NOHUGEPAGE", "MADV_HUGEPAGE"])
def test_memory_that_the_system_takes_away_is_compared(pages, system):
    size = 4 * ROWS * WIDTH
    place = mapped(system, 2 * HUGE)
    place += -place % HUGE
    system.madvise(place, HUGE, getattr(mmap, pages))
    values = tensor_at(place).fill_(3)
    found = fingerprints_of(values)
    taken = size if pages == "MADV_NOHUGEPAGE" else HUGE
    assert system.madvise(place, taken, mmap.MADV_DONTNEED) == 0
    assert not found.hold()
    assert values[0, 0] == 0


def test_written_values_of_a_file_that_the_system_takes_away_are_compared(system, tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(bytes(4 * ROWS * WIDTH))
    values = torch.from_file(str(file), shared=False, size=ROWS * WIDTH).view(ROWS, WIDTH)
    found = fingerprints_of(values.fill_(3))
    assert system.madvise(values.data_ptr(), 4 * ROWS * WIDTH, mmap.MADV_DONTNEED) == 0
    assert values[0, 0] == 0
    assert not found.hold()


@pytest.mark.parametrize("writer", ["child", "parent"])
def test_a_fork_has_memory_of_its_own(writer, values):
    found = fingerprints_of(values)
    here, there = multiprocessing.Pipe()

    def write_when_asked():
        here.recv()
        values.neg_()
        here.send("written")

    def compare():
        if writer == "child":
            values.neg_()
        else:
            there.send("ready")
            there.recv()
        assert [found.hold() for _ in range(3)] == [writer == "parent"] * 3

    if writer == "parent":
        threading.Thread(target=write_when_asked, daemon=True).start()
    assert in_child(compare) == 0
    assert [found.hold() for _ in range(3)] == [writer == "child"] * 3


def test_pinned_memory_is_compared(values, monkeypatch):
    """A device writes to pinned memory unseen by the system."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    assert is_compared(fingerprints_of(values))


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_of_a_loaded_model_are_watched(kind, tmp_path):
    if not can_watch():
        pytest.skip("this system does not report which memory was written")
    model_with(d_model=256).save_pretrained(tmp_path)
    settings = {
        "float32": {},
        "bfloat16": {"dtype": torch.bfloat16},
        "int8": {"quantization_config": VaswaniInt8Config()},
    }
    model = VaswaniForConditionalGeneration.from_pretrained(tmp_path, **settings[kind])
    for _ in range(4):
        translate(model, num_beams=2)
    _, snapshot, _ = _prepared_of[model.model.decoder.layers]
    states = [own.held for own in snapshot.fingerprints.structures if own.count > HUGE // 64]
    assert len(states) > 10
    assert min(states) > 0


def test_all_values_are_compared_where_the_system_does_not_tell(values):
    """A process that may open no more files cannot ask the system."""

    def compare():
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
        found = fingerprints_of(values)
        assert is_compared(found)
        values.neg_()
        assert not found.hold()

    assert in_child(compare) == 0
