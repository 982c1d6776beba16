"""Child processes for code that a test kills."""

import os
import traceback

import pytest
import torch


def in_child(function):
    """Run a function in a child process and return its exit code, -9 if it was killed.

    Skips the test if this process uses a GPU, which a forked process cannot use.
    """
    if torch.cuda.is_initialized():
        pytest.skip("a forked process cannot use a GPU: CUDA_VISIBLE_DEVICES= runs this test")
    if not (pid := os.fork()):
        try:
            function()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
