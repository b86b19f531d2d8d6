"""Memory nodes: which one a PCI device is attached to, and how memory gets there. Linux; elsewhere nothing happens."""

import ctypes
import os
import platform
from pathlib import Path

_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED = 1
_MPOL_MF_MOVE = 2
NODE_BITS = 1024


def node_of_pci_device(domain: int, bus: int, device: int, root: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """None where the system does not say, or has one node only and says -1."""
    try:
        node = int((root / f"{domain:04x}:{bus:02x}:{device:02x}.0" / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def several_nodes(root: Path = Path("/sys/devices/system/node")) -> bool:
    return len(list(root.glob("node[0-9]*"))) > 1


def bind_memory(address: int, num_bytes: int, node: int) -> bool:
    """Prefer `node` for a page-aligned range and move there what has memory already; whether the system did.

    Preferred and not required: a full node must not end a process that was promised its memory at start.
    """
    number = _MBIND.get(platform.machine())
    if number is None or os.name != "posix" or not several_nodes():
        return False
    mask = (ctypes.c_ulong * (NODE_BITS // 64))()
    mask[node // 64] = 1 << node % 64
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    arguments = (number, address, num_bytes, _MPOL_PREFERRED, ctypes.addressof(mask), NODE_BITS + 1, _MPOL_MF_MOVE)
    return bool(syscall(*map(ctypes.c_long, arguments)) == 0)
