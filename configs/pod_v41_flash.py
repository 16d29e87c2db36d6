"""DeepSeek-V4.1-Flash on a TPU pod that is not here: does it fit, and what would its steps do.

    pip install libtpu    # once; the compiler
    python -m experiments.pod_plan --config=configs/pod_v41_flash.py --topology=v5p:4x4x4

Minutes to tens of minutes a topology, all of it the TPU compiler's. `:short` has four layers in place
of forty; `:smoke` is the tiny preset. Other topologies: v5e:16x16, v5p:8x8x8, v6e:8x8, tpu7x:4x4x4.
"""

from ml_collections import config_dict


def get_config(arg: str = "") -> config_dict.ConfigDict:
    if arg not in ("", "short", "smoke"):
        raise ValueError(f"variant {arg!r} is unknown: leave it out, or use short or smoke")
    config = config_dict.ConfigDict()
    config.name = "pod"
    config.model = "tiny" if arg == "smoke" else "v41_flash"
    config.short = arg != ""
    config.batch = 4 if arg == "smoke" else 16  # requests that a rank decodes side by side
    config.context = 512 if arg == "smoke" else 32768  # tokens of each, prompt and answer
    config.prompt = 64 if arg == "smoke" else 1024  # tokens of a prompt's chunk
    config.drafts = 5
    config.ragged = False  # experts' rows by a ragged all-to-all, without padding
    config.extra_experts = 0  # copies of experts, at least, in each layer
    config.format = "bytes"  # of the memory: "bytes" as in service, or "values"
    config.programs = ("decode",) if arg == "smoke" else ("decode", "prompt", "sample")
    config.provenance = (
        ("model", "released", "deepseek-ai/DeepSeek-V4.1-Flash config.json"),
        ("*", "assumed", "this experiment"),
    )
    return config
