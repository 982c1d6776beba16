"""Child processes for code that a test kills."""

import os
import traceback


def in_child(function):
    """Run a function in a child process and return its exit code, -9 if it was killed."""
    if not (pid := os.fork()):
        try:
            function()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
