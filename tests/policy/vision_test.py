"""Vision placement: patch counts of real images and the machine draw."""

import jax
import numpy as np

from deepinfer_jax.policy import vision


def test_patches_of_resized_images():
    """ViT grids of DeepSeek-V4.1-Flash, patch 14: 546 x 546, 644 x 490, 1708 x 966."""
    width, height = np.array([546, 644, 1708, 15]), np.array([546, 490, 966, 14])
    assert vision.patches(width, height).tolist() == [39 * 39, 46 * 35, 122 * 69, 2]
    assert vision.patches(9, 9, patch=4) == 9


def test_random_machine_then_fewest_patches():
    eligible = np.array([[True, True], [False, False], [True, False]])
    assigned = np.array([[5, 4], [0, 0], [9, 0]])
    chosen = [int(vision.choose(eligible, assigned, draw)) for draw in range(4)]
    assert chosen == [1, 4, 1, 4]  # the machine is drawn first, although GPU 4 holds most
    jitted = jax.jit(vision.choose)
    assert [int(jitted(eligible, assigned, draw)) for draw in range(4)] == chosen
    assert vision.choose(eligible & False, assigned, 3) == 6
