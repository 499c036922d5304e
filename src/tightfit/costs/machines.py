"""The machines that roofline costs know: adding one is an entry in `MACHINES`."""

from __future__ import annotations

import msgspec


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Properties of a device for a roofline; rates are the reachable ones."""

    name: str  # a name for people
    bytes_per_s: float  # reachable memory bandwidth
    # convolution_flops_per_s, matrix_flops_per_s: reachable single-precision rates of convolutions
    # and of matrix products
    convolution_flops_per_s: float
    matrix_flops_per_s: float
    launch_s: float  # the least an op costs
    granularity_bytes: int = 512  # the device's allocator rounds sizes up to multiples of it
    source: str = ""  # where the numbers come from


_SHARES = "peaks: {}; reachable shares as in the study's graphs: {}"

MACHINES: dict[str, Machine] = {
    "p100": Machine(
        name="NVIDIA Tesla P100",
        bytes_per_s=732e9 * 0.75,
        convolution_flops_per_s=9.3e12 * 0.60,
        matrix_flops_per_s=9.3e12 * 0.75,
        launch_s=5e-6,
        source=_SHARES.format("NVIDIA P100 PCIe datasheet", "0.75, 0.60, 0.75"),
    ),
    "v100": Machine(
        name="NVIDIA Tesla V100",
        bytes_per_s=900e9 * 0.75,
        convolution_flops_per_s=15.7e12 * 0.60,
        matrix_flops_per_s=15.7e12 * 0.75,
        launch_s=5e-6,
        source=_SHARES.format("NVIDIA V100 SXM2 datasheet, fp32", "0.75, 0.60, 0.75 of the P100"),
    ),
    "a100": Machine(
        name="NVIDIA A100",
        bytes_per_s=1555e9 * 0.80,
        convolution_flops_per_s=156e12 * 0.40,
        matrix_flops_per_s=156e12 * 0.55,
        launch_s=4e-6,
        source=_SHARES.format("NVIDIA A100 40 GB datasheet, TF32", "0.80, 0.40, 0.55"),
    ),
    "h100": Machine(
        name="NVIDIA H100",
        bytes_per_s=3350e9 * 0.80,
        convolution_flops_per_s=494.7e12 * 0.40,
        matrix_flops_per_s=494.7e12 * 0.55,
        launch_s=4e-6,
        source=_SHARES.format(
            "NVIDIA H100 SXM datasheet, dense TF32", "0.80, 0.40, 0.55 of the A100"
        ),
    ),
}
