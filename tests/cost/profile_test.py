"""Step models from kernel tables: tables whose answer is known by construction."""

import numpy as np

from deepinfer_jax.cost.profile import Decoder, Profile, _max_affine


def write(folder, name, header, rows):
    lines = [header, *(",".join(map(str, row)) for row in rows)]
    (folder / name).write_text("\n".join(lines))


def test_a_step_adds_layers_head_and_attention(tmp_path):
    write(tmp_path, "dense.csv", "layer,tokens,time_us", [("o_proj", t, 10 + t) for t in (1, 64)])
    write(
        tmp_path,
        "per_sequence.csv",
        "layer,sequences,time_us",
        [("lm_head", 1, 5), ("lm_head", 8, 5)],
    )
    grid = [(q, c, n, k, n * k + q) for q in (0, 16) for c in (0, 16) for n in (0, 1, 8)
            for k in (0, 16, 32) if q or n]  # fmt: skip
    names = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"
    write(tmp_path, "attention.csv", names, grid)
    profile = Profile(tmp_path, Decoder(2, 8, 16, 1.0))
    assert np.isclose(profile.seconds(0, 0, 8, 24), (5 + 2 * (18 + 192)) * 1e-6)
    assert not profile.outside
    profile.seconds(0, 0, 8, 64)
    assert list(profile.outside) == ["attention kv_decode: 32 is the table's end"]


def test_a_maximum_of_two_forms_is_found_again():
    columns = np.asarray([(1.0, n, n * k) for n in range(1, 60) for k in (1, 10)])
    target = np.maximum(columns @ [5.0, 0.01, 0.001], columns @ [1.0, 0.3, 0.001])
    found = (columns @ _max_affine(columns, target, 2).T).max(axis=1)
    assert np.abs(found / target - 1).max() < 0.01
