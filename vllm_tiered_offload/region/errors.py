"""What can go wrong with the host region. Each text is one line and names the setting to change, if there is one."""


class RegionError(RuntimeError):
    """The host region cannot be made, opened or used."""


class RegionMemoryError(RegionError):
    """The machine or the cgroup has not enough memory for the region."""


class CapacityError(RegionMemoryError):
    """The configured capacity cannot work: below one row, or above what RAM and the cgroup allow."""


class RegionGoneError(RegionError):
    """The announced region cannot be found: its process ended, or the process id belongs to somebody else now."""


class RegionClosedError(RegionError):
    """The region was used after `close`."""
