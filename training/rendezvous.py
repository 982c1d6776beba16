"""A fresh rendezvous store for processes that a launcher has restarted."""

import os
import socket
import time
from typing import Any

from torch.distributed import TCPStore

_ADDRESS = "vaswani/port_of_the_store"
# The main process keeps its store open until it ends.
_stores: list[TCPStore] = []


def renew_store() -> None:
    """Give the processes that torch's launcher has started a separate rendezvous store.

    In torch 2.13, processes meet in a store of the launcher, which outlives them. Restarted
    processes find the addresses of dead processes in it, and fail to connect or wait for half an
    hour. Here the main process opens a new store and writes its port to the launcher's store. A
    port from before a restart does not answer, and the other processes then read the port again.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    host = os.environ["MASTER_ADDR"]
    launchers = TCPStore(host, int(os.environ["MASTER_PORT"]), is_master=False)
    if os.environ["RANK"] == "0":
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
        _stores.append(store)
        port = store.port
        launchers.set(_ADDRESS, str(port))
    else:
        port = _port_that_answers(host, launchers)
    # torch.distributed reads both variables when it is initialized.
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="False")


def _port_that_answers(host: str, launchers: Any) -> int:
    end = time.monotonic() + launchers.timeout.total_seconds()
    while time.monotonic() < end:
        port = int(launchers.get(_ADDRESS))
        try:
            socket.create_connection((host, port), timeout=5).close()
        except OSError:
            time.sleep(0.1)
        else:
            return port
    raise TimeoutError(
        f"The main process opened no store on {host}: see the output of the main process."
    )
