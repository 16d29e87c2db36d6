"""Requests with images: how many GPUs must encode so that prompts do not wait for them?

Twenty minutes of a public multimodal service, replayed at 2.4 times its rate. Images are encoded
on machines of their own, the machine drawn at random and there the GPU with the fewest patches, then
the prompt goes the way of any other. The cases differ in encoders only; "2 x 1" has two machines of
one GPU, where the draw is all the balance there is.

    python -m experiments.simulate --config=configs/images.py --workdir=runs/images

Half a minute, nearly all of it compilation. The stage "match" of the report contains the encoding.
"""

from ml_collections import config_dict


def get_config(arg: str = "") -> config_dict.ConfigDict:
    if arg not in ("", "smoke"):
        raise ValueError(f"variant {arg!r} is unknown: leave it out or use smoke")
    config = config_dict.ConfigDict()
    config.name = "images"
    config.title = "Images encoded on machines of their own"
    config.subtitle = 'Cases: encoder machines x GPUs. The stage "match" contains the encoding.'
    config.workload = {
        "kind": "trace",
        "path": "configs/traces/servegen_multimodal_mm-image_10rps_1200s.csv.gz",
        "requests": 400 if arg else 0,
        "rate_factor": 2.4,
    }
    config.engines = {"mixed": 8, "slots": 256}
    config.policy = {"prefill": "least_loaded"}
    config.cost = {
        "kind": "seconds",
        "prefill_step": 16.50142e-3,
        "prefill_token": 15.18344e-6,
        "prefill_pair": 2 * 4.209989e-10,
        "decode_forms": ((5.74e-3, 0.0, 54.01e-3 / (16_384 * 64)),),
    }
    config.prefill = {"batch_tokens": 8192.0, "chunk_multiple": 1.0}
    # The encoder of V4.1-Flash at 40 % of an H200's dense BF16 rate. 0.42e9 weights multiply a patch
    # (32 layers of 12.8e6, and a ninth of the projector's 54.5e6); 4 x 32 x 1024 operations a pair.
    rate = 0.4 * 989e12
    config.encoders = {
        "machines": 1,
        "gpus": 1,
        "image_seconds": 1e-3,
        "patch_seconds": 2 * 0.42e9 / rate,
        "pair_seconds": 4 * 32 * 1024 / rate,
        "transfer_seconds": 1e-3,
    }
    config.cases = {
        "1_x_1": {},
        "1_x_2": {"encoders": {"gpus": 2}},
        "2_x_1": {"encoders": {"machines": 2}},
        "1_x_4": {"encoders": {"gpus": 4}},
    }
    config.slo = {"ttft": 1.0, "tpot": 0.05}
    config.warmup_seconds = 0.0
    config.compile = "quick" if arg else "optimised"
    config.provenance = (
        ("workload.path", "separate", "ServeGen, client pool mm-image (the trace's README)"),
        ("workload.rate_factor", "assumed", "so that one GPU is nearly always busy"),
        ("engines.*", "assumed", "workload W2's workers"),
        ("policy.*", "assumed", "this experiment"),
        ("cost.*", "separate", "as in configs/w2_azure.py: NVIDIA Dynamo replay 1.4.2"),
        ("prefill.*", "separate", "NVIDIA Dynamo replay 1.4.2"),
        ("encoders.*", "assumed", "counted operations at 40 % of an H200; 1 ms of fixed cost"),
        ("slo.*", "assumed", "an interactive service"),
        ("*", "assumed", "this experiment"),
    )
    return config
