"""Device memory whose end comes and goes while its address stays: a reserved range, of which a beginning is mapped.

    reserve:  [ ---------------------------- addresses, no memory ---------------------------- ]
    map:      [ piece | piece | piece | -------------------- ]      each piece: memory of its own, behind the last
    unmap:    [ piece | piece | --------------------------- ]       the last ones, whole

The driver gives memory in granules (2 MiB), so the mapped part is a whole number of these. Whoever unmaps must know
that nothing reads or writes there any more.
Source: CUDA C++ Programming Guide, Virtual Memory Management.
"""

from typing import Any

from cuda.errors import DriverError, driver_error

PIECE_GRANULES = 32
"""A piece is at least 64 MiB where granules are 2 MiB: a call of the driver for each takes tens of microseconds."""


class GrowingMemory:
    """`most_bytes` of addresses on one device; `mapped_bytes` of them have memory."""

    def __init__(self, driver: Any, device: int, most_bytes: int) -> None:
        """driver: the module cuda.bindings.driver, or what behaves like it. Raises DriverError."""
        self._driver = driver
        self._device = device
        self._pieces: list[tuple[int, int, Any]] = []  # address, bytes, handle
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device
        self._properties = properties
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granule = int(self._call("cuMemGetAllocationGranularity", properties, minimum))
        self.most_bytes = _up(most_bytes, self.granule)
        self.address = int(self._call("cuMemAddressReserve", self.most_bytes, 0, 0, 0))

    @property
    def mapped_bytes(self) -> int:
        return sum(size for _, size, _ in self._pieces)

    def resize(self, size_bytes: int) -> None:
        """Map what is needed to hold `size_bytes`, zeroed, or unmap whole pieces that are not. Raises DriverError if
        there is no memory; then as much is mapped as before.
        """
        if not 0 <= size_bytes <= self.most_bytes:
            raise ValueError(f"{size_bytes} bytes of {self.most_bytes}")
        while self._pieces and self.mapped_bytes - self._pieces[-1][1] >= size_bytes:
            self._unmap_last()
        before = len(self._pieces)
        try:
            while (missing := size_bytes - self.mapped_bytes) > 0:
                self._map(missing)
        except DriverError:
            while len(self._pieces) > before:
                self._unmap_last()
            raise
        if len(self._pieces) > before:
            self._call("cuCtxSynchronize")  # the zeros are there before any stream comes

    def close(self) -> None:
        """Give everything back. Idempotent."""
        while self._pieces:
            self._unmap_last()
        if self.address:
            self._call("cuMemAddressFree", self.address, self.most_bytes)
            self.address = 0

    def _map(self, missing: int) -> None:
        """One more piece, zeroed."""
        address = self.address + self.mapped_bytes
        size = min(_up(missing, self.granule), PIECE_GRANULES * self.granule)
        handle = self._call("cuMemCreate", size, self._properties, 0)
        try:
            self._call("cuMemMap", address, size, 0, handle, 0)
        except DriverError:
            self._call("cuMemRelease", handle)
            raise
        self._pieces.append((address, size, handle))
        access = self._driver.CUmemAccessDesc()
        access.location.type = self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self._device
        access.flags = self._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call("cuMemSetAccess", address, size, [access], 1)
        self._call("cuMemsetD8", address, 0, size)

    def _unmap_last(self) -> None:
        address, size, handle = self._pieces.pop()
        self._call("cuMemUnmap", address, size)
        self._call("cuMemRelease", handle)

    def _call(self, name: str, *arguments: Any) -> Any:
        """The result of a driver's function. Raises DriverError."""
        error, *results = getattr(self._driver, name)(*arguments)
        if int(error):
            raise driver_error(name, int(error), error.name)
        return results[0] if results else None


def _up(size: int, granule: int) -> int:
    return -(-size // granule) * granule
