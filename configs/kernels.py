"""Every kernel shape of V4.1-Flash, compiled for four TPU generations without a TPU.

    python -m experiments.kernel_report --config=configs/kernels.py --workdir=runs/kernels

Needs libtpu (`pip install libtpu`), one process of it at a time. About ten minutes. Expect no kernel
that fails to compile, and bounds within a small factor of the roofline. `:smoke` compiles one shape
for one generation in a few seconds.
"""

from ml_collections import config_dict


def get_config(arg: str = "") -> config_dict.ConfigDict:
    if arg not in ("", "smoke"):
        raise ValueError(f"variant {arg!r} is unknown: leave it out or use smoke")
    config = config_dict.ConfigDict()
    config.name = "kernels"
    # op/shape as in pallas_kernels.catalogue; (): all of them
    config.shapes = ("window_attention/v41_decode_64",) if arg else ()
    config.generations = ("v6e",) if arg else ("v5e", "v5p", "v6e", "tpu7x")
    config.provenance = (
        ("generations", "documented", "libtpu 0.0.42.1 compiles for these"),
        ("*", "assumed", "this experiment"),
    )
    return config
