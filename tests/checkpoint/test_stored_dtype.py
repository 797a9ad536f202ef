"""The dtype of a checkpoint's weights is found in file headers."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from moe_jax.checkpoint import CheckpointError, save_orbax, stored_dtype
from tests.helpers import tiny

BF16 = ml_dtypes.bfloat16


def written(folder, **dtypes):
    save_file({name: np.zeros(2, dtype) for name, dtype in dtypes.items()}, folder / "model.safetensors")
    return stored_dtype(folder)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_one_dtype_is_kept(tmp_path, dtype):
    found = written(tmp_path, a=np.dtype(dtype) if dtype != "bfloat16" else BF16)
    assert (found.name, found.remark) == (dtype, None)


def test_a_bias_in_f32_beside_bf16_weights_is_no_weight(tmp_path):
    assert written(tmp_path, a=BF16, **{"gate.e_score_correction_bias": np.float32}).name == "bfloat16"


def test_several_dtypes_become_the_widest_and_it_is_said(tmp_path):
    found = written(tmp_path, a=BF16, b=np.float16)
    assert found.name == "float32" and found.remark == "the weights are bfloat16 and float16; all are written as float32"


def test_fp8_becomes_bf16_and_it_is_said(tmp_path):
    found = written(tmp_path, a=ml_dtypes.float8_e4m3fn, a_scale_inv=np.float32, b=BF16)
    assert found.name == "bfloat16" and "FP8" in found.remark


def test_an_orbax_folder_has_a_stored_dtype(tmp_path):
    save_orbax(tiny.model(), tmp_path / "orbax")
    assert stored_dtype(tmp_path / "orbax").name == "float32"


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no weight files"):
        stored_dtype(tmp_path)
