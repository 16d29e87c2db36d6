"""The tiny trained model on a mesh: experts divided, moved while it answers, over one or more processes.

    python -m experiments.mesh --config=configs/mesh.py
    python -m experiments.mesh --config=configs/mesh.py --processes=2

Both print the same digest of answers. A minute or two, most of it compiling; `:smoke` is shorter.
"""

from ml_collections import config_dict


def get_config(arg: str = "") -> config_dict.ConfigDict:
    if arg not in ("", "smoke"):
        raise ValueError(f"variant {arg!r} is unknown: leave it out or use smoke")
    config = config_dict.ConfigDict()
    config.name = "mesh"
    config.model = "trained_tiny"
    config.checkpoint = "configs/checkpoints/tiny"
    config.groups = 1  # expert groups; each holds every expert
    config.engines = 4  # ranks of a group
    config.context = 1  # devices of a rank, which divide its prompts
    config.virtual_devices = 4  # of all processes together, where the machine has only CPUs
    config.extra_experts = 4  # copies of experts, at least, in each layer
    config.window = 16  # decode steps whose routing is counted
    config.rebalance_steps = 8 if arg else 24  # decode steps between two moves of experts
    config.concurrency = 2  # requests of a rank side by side
    config.requests = 8 if arg else 32
    config.prompt = 32  # tokens
    config.answer = 16 if arg else 64  # tokens
    config.drafts = 2 if arg else 5
    config.temperature = 1.0
    config.format = "values"  # of the memory: "bytes" as in service, or "values"
    config.provenance = (("*", "assumed", "this experiment"),)
    return config
